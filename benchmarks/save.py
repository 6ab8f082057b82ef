"""What a save costs, ours beside stock DCP and the limits of the machine: `python -m benchmarks.save [--gb 2]`.

Every system runs in fresh rank processes, round after round in another order, on the same FSDP2 + AdamW state. The columns, each the
slowest rank's; medians, and where there are several saves "steady" leaves out the first of each process:

blocked   the training thread stands still: collecting the state, the call, and the wait before the optimizer may step. Between the
          call and that step the thread sleeps for `--forward-s`, as the host of a GPU does during forward and backward.
staged    from the call until the optimizer may change the state.
durable   from the call until the checkpoint is complete on disk; GB/s is the state over that.
extra     peak PSS of ranks and all their processes, less what they had before the system was set up, over the size of the state;
          sampled in a round of its own, because sampling takes time.
helper    the largest RSS of a process that a rank started (our writer, DCP's process), shared memory included.
set-up    what training waits for once: making the system, and for ours the plan after the first optimizer step.
"""

import argparse
from dataclasses import asdict, dataclass, field
from pathlib import Path

from backstay.testing.ranks import RanksFailed
from benchmarks import common, memory
from benchmarks.save_systems import (
    COPY,
    OVERLAP,
    STOCK,
    SYSTEMS,
    WRITE,
    Run,
    Task,
    run_limits,
    run_system,
)


@dataclass
class Results:
    """All that was measured of one system.

    Attributes:
        runs: of each round, of each rank.
        problem: why there is no more of it.
    """

    runs: list[list[Run]] = field(default_factory=list)
    extra_memory: float = float("nan")
    helper_rss_bytes: int = 0
    problem: str = ""

    def of(self, name: str, *, first: bool) -> list[float]:
        """One number of all first or all other saves, the slowest rank's."""
        chosen = slice(0, 1) if first else slice(1, None)
        return [
            max(getattr(save, name) for save in same)
            for ranks in self.runs
            for same in list(zip(*(run.saves for run in ranks), strict=True))[chosen]
        ]

    @property
    def num_bytes(self) -> int:
        """Of the state."""
        return self.runs[0][0].num_bytes

    @property
    def set_up_s(self) -> list[float]:
        """Of each round."""
        return [max(run.set_up_s for run in ranks) for ranks in self.runs]


def run_all(options: argparse.Namespace) -> tuple[dict[str, Results], dict[str, list[float]]]:
    """All rounds of all systems, then memory."""
    found = {name: Results() for name in options.systems}
    limits: dict[str, list[float]] = {WRITE: [], COPY: []}
    for number in range(options.rounds):
        for name in order(options.systems, number):
            common.say(f"round {number + 1} of {options.rounds}: {name}")
            run_once(name, found[name], options)
        common.say(f"round {number + 1} of {options.rounds}: limits")
        for name, value in measure_limits(found, options).items():
            limits[name].append(value)
    for name in options.systems:
        common.say(f"memory: {name}")
        watch_memory(name, found[name], options)
    return found, limits


def order(systems: list[str], number: int) -> list[str]:
    """Another order in each round, so that no system always runs behind the same one."""
    turned = systems[number % len(systems) :] + systems[: number % len(systems)]
    return turned if number % 2 == 0 else turned[::-1]


def run_once(name: str, results: Results, options: argparse.Namespace) -> None:
    """One round of one system; it is not tried again once it failed."""
    if results.problem:
        return
    with common.scratch(options.directory) as directory:
        (directory / "pids").mkdir()
        try:
            results.runs.append(call(name, directory, options.saves, options))
        except RanksFailed as error:
            results.problem = str(error)
            common.say(f"{name} failed:\n{error}")


def call(name: str, directory: Path, num_saves: int, options: argparse.Namespace) -> list[Run]:
    """The runs of all ranks."""
    task = Task(
        system=name,
        directory=directory,
        num_bytes=int(options.gb * 1e9),
        num_saves=num_saves,
        forward_s=options.forward_s,
        pause_s=options.pause_s,
    )
    return common.call_ranks(options.ranks, run_system, task, timeout_s=options.timeout_s)


def watch_memory(name: str, results: Results, options: argparse.Namespace) -> None:
    """Two saves under observation; their times do not count."""
    if results.problem:
        return
    with common.scratch(options.directory) as directory:
        with memory.MemoryWatch(directory / "pids") as watch:
            began_at = min(run.began_at for run in call(name, directory, 2, options))
        growth = watch.peak(began_at) - watch.before(began_at)
        results.extra_memory = growth / results.num_bytes
        results.helper_rss_bytes = watch.helper_peak(began_at)


def measure_limits(found: dict[str, Results], options: argparse.Namespace) -> dict[str, float]:
    """Limits with as many bytes as the state has."""
    sizes = [results.num_bytes for results in found.values() if results.runs]
    num_bytes = sizes[0] if sizes else int(options.gb * 1e9)
    with common.scratch(options.directory) as directory:
        task = Task(
            system="",
            directory=directory,
            num_bytes=num_bytes,
            num_saves=0,
            forward_s=0.0,
            pause_s=0.0,
        )
        ranks = common.call_ranks(options.ranks, run_limits, task, timeout_s=options.timeout_s)
    return {name: max(each[name] for each in ranks) for name in (WRITE, COPY)}


# Report ---------------------------------------------------------------------------------------------------------------

HEAD = (
    "system",
    "first blocked",
    "blocked",
    "staged",
    "durable (min-max)",
    "GB/s",
    "first durable",
    "extra",
    "helper",
    "set-up",
)


def row(name: str, results: Results) -> list[str]:
    """One line of the table."""
    if not results.runs:
        return [name, "failed", *["-"] * (len(HEAD) - 2)]
    durable = results.of("durable_s", first=False)
    return [
        name,
        common.seconds(common.median(results.of("blocked_s", first=True))),
        common.seconds(common.median(results.of("blocked_s", first=False))),
        common.seconds(common.median(results.of("staged_s", first=False))),
        common.spread(durable),
        f"{results.num_bytes / common.median(durable) / 1e9:.2f}",
        common.seconds(common.median(results.of("durable_s", first=True))),
        f"{results.extra_memory:.2f}",
        f"{results.helper_rss_bytes / 1e6:.0f} MB",
        common.seconds(common.median(results.set_up_s)),
    ]


def limit_row(name: str, values: list[float], num_bytes: int) -> list[str]:
    """One line for a limit of the machine."""
    speed = f"{num_bytes / common.median(values) / 1e9:.2f}"
    return [name, "", "", "", common.spread(values), speed, *[""] * 4]


def ratios(found: dict[str, Results], limits: dict[str, list[float]]) -> dict[str, float]:
    """What the project claims, as numbers."""
    ours = found.get(OVERLAP)
    stock = [results for name, results in found.items() if name in STOCK and results.runs]
    if ours is None or not ours.runs:
        return {}
    blocked = steady(ours, "blocked_s")
    durable = steady(ours, "durable_s")
    claims = {
        "first save blocked / steady": common.median(ours.of("blocked_s", first=True)) / blocked,
        "first save durable / steady": common.median(ours.of("durable_s", first=True)) / durable,
        "durable, ours / raw write": durable / common.median(limits[WRITE]),
        "extra memory over state": ours.extra_memory,
    }
    if stock:
        best_blocked = min(steady(each, "blocked_s") for each in stock)
        best_durable = min(steady(each, "durable_s") for each in stock)
        claims |= {
            "blocked, ours / best stock": blocked / best_blocked,
            "durable, ours / best stock": durable / best_durable,
        }
    return claims


def steady(results: Results, name: str) -> float:
    """Median over all but first saves."""
    return common.median(results.of(name, first=False))


def report(
    found: dict[str, Results], limits: dict[str, list[float]], options: argparse.Namespace
) -> None:
    """The table, the claims, and the file."""
    sizes = [results.num_bytes for results in found.values() if results.runs]
    num_bytes = sizes[0] if sizes else 0
    common.print_machine()
    print(
        f"{num_bytes / 1e9:.3f} GB of FSDP2 + AdamW state on {options.ranks} ranks; {options.rounds} rounds of 1 first and "
        f"{options.saves - 1} steady saves; the first comes {options.pause_s:g} s after the first step\n"
    )
    rows = [row(name, results) for name, results in found.items()]
    rows += [limit_row(name, values, num_bytes) for name, values in limits.items()]
    common.print_table(HEAD, rows)
    claims = ratios(found, limits)
    print()
    common.print_table(("claim", "value"), [(name, f"{v:.3f}") for name, v in claims.items()])
    for name, results in found.items():
        if results.problem:
            print(f"\n{name} failed: {results.problem.splitlines()[0]}")
    systems = {name: asdict(results) for name, results in found.items()}
    common.write_json(
        options.json, options, {"systems": systems, "limits": limits, "claims": claims}
    )


def main() -> None:
    """Measure and print."""
    parser = common.make_parser(__doc__ or "", gb=2.0, rounds=3, ranks=2)
    parser.add_argument("--saves", type=int, default=4, help="saves of each process (4)")
    parser.add_argument("--forward-s", type=float, default=0.5, help="sleep before the step (0.5)")
    parser.add_argument("--pause-s", type=float, default=5.0, help="sleep before the first (5)")
    parser.add_argument(
        "--systems",
        nargs="+",
        default=list(SYSTEMS),
        choices=SYSTEMS,
        metavar="NAME",
        help="some of: " + "; ".join(SYSTEMS),
    )
    options = parser.parse_args()
    report(*run_all(options), options)


if __name__ == "__main__":
    main()
