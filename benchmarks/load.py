"""What loading costs, ours beside stock DCP and plain reads: `python -m benchmarks.load [--gb 2]`.

Each of `backstay.restore` and `dcp.load` reads a checkpoint of ours and one of stock DCP, both of the same FSDP2 + AdamW state written by
`--ranks` ranks: on as many ranks, and resharded on one; cold (files dropped from the page cache) and warm (read once before). A host
below this machine may keep a cache of its own, which nobody here can drop.

A load begins with a new model and an optimizer without state, and ends when both hold all values: for stock that is `get_optimizer_state_dict`
(which makes the state by an empty step), `dcp.load` and `set_optimizer_state_dict`. Every load runs in new processes and is checked by a sum over
all values. Raw is a plain program that reads the same files with large pieces on a few threads: O_DIRECT if cold, else from
the page cache, into a few buffers that it uses again, so without the price of fresh memory; the files are shared out among the ranks.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from backstay.checkpointer import Checkpointer
from backstay.load.restore import restore
from backstay.state import TrainState, local_tensor
from backstay.testing.ranks import RanksFailed
from benchmarks import common, limits, trainings
from benchmarks.trainings import Training

OURS, STOCK, RAW = "backstay.restore", "dcp.load", "raw read"
CHECKPOINTS = ("ours", "stock")
STEP = 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """One load.

    Attributes:
        system: who loads.
        path: directory of the checkpoint.
        is_cold: whether the page cache was emptied.
    """

    system: str
    path: Path
    num_bytes: int
    is_cold: bool


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one rank found; `total` is a sum over all values of all ranks."""

    seconds: float
    total: float


# In the ranks ---------------------------------------------------------------------------------------------------------


def write_checkpoints(rank: int, num_ranks: int, directory: Path, num_bytes: int) -> float:
    """Write the same state with both systems; returns the sum over its values."""
    training = trainings.make_training(num_bytes)
    with Checkpointer(directory / "ours", state_of(training)) as checkpointer:
        checkpointer.save(STEP).wait()
    model, optimizer = training.model, training.optimizer
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=directory / "stock")
    return total_of(training)


def run_load(rank: int, num_ranks: int, task: Task) -> Loaded:
    """One load in this rank."""
    if task.system == RAW:
        files = limits.data_files(task.path)[rank::num_ranks]
        common.barrier()
        return Loaded(seconds=limits.raw_read(files, direct=task.is_cold), total=math.nan)
    training = trainings.make_training(task.num_bytes, with_state=False)
    load = load_ours if task.system == OURS else load_stock
    common.barrier()
    began = time.perf_counter()
    load(training, task.path)
    seconds = time.perf_counter() - began
    return Loaded(seconds=seconds, total=total_of(training))


def load_ours(training: Training, path: Path) -> None:
    """With `backstay.restore`."""
    restore(path, state_of(training))


def load_stock(training: Training, path: Path) -> None:
    """As users of DCP do it."""
    model, optimizer = training.model, training.optimizer
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def state_of(training: Training) -> TrainState:
    """The train state that both checkpoints hold."""
    return TrainState(model=training.model, optimizer=training.optimizer)


def total_of(training: Training) -> float:
    """Sum of the squares of all values, over all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for parameter in training.model.parameters():
            state = training.optimizer.state[parameter]
            for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                total += local_tensor(tensor).double().square().sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


# In the caller --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What one line of the table measures."""

    num_ranks: int
    is_cold: bool
    system: str
    checkpoint: str

    @property
    def cache(self) -> str:
        """In a word."""
        return "cold" if self.is_cold else "warm"


@dataclass(frozen=True, kw_only=True)
class Written:
    """The two checkpoints."""

    directory: Path
    num_bytes: int
    total: float

    def path(self, checkpoint: str) -> Path:
        """Where stock DCP finds one."""
        if checkpoint == "stock":
            return self.directory / "stock"
        return self.directory / "ours" / f"step-{STEP:08d}" / "weights"


def cases(num_ranks: int) -> list[Case]:
    """All lines."""
    return [
        Case(ranks, is_cold, system, checkpoint)
        for ranks in dict.fromkeys((num_ranks, 1))
        for is_cold in (True, False)
        for system in (OURS, STOCK, RAW)
        for checkpoint in CHECKPOINTS
    ]


def measure(
    written: Written, options: argparse.Namespace
) -> tuple[dict[Case, list[float]], dict[Case, str]]:
    """Seconds of each round by case, and what failed."""
    found: dict[Case, list[float]] = {case: [] for case in cases(options.ranks)}
    problems: dict[Case, str] = {}
    for number in range(options.rounds):
        for case in list(found)[:: -1 if number % 2 else 1]:
            if case in problems:
                continue
            common.say(f"round {number + 1} of {options.rounds}: {name_of(case)}")
            try:
                found[case].append(measure_case(case, written, options.timeout_s))
            except (RanksFailed, ValueError) as error:
                problems[case] = str(error)
                common.say(f"failed: {error}")
    return found, problems


def measure_case(case: Case, written: Written, timeout_s: float) -> float:
    """One load; the slowest rank's seconds."""
    path = written.path(case.checkpoint)
    limits.evict(path)
    if not case.is_cold:
        limits.raw_read(limits.data_files(path), direct=False)
    cached = limits.cached_share(limits.data_files(path))
    if case.is_cold == (cached > 0.5):
        common.say(f"  {cached:.0%} of the files are in the page cache, although {case.cache}")
    task = Task(
        system=case.system,
        path=path.parent if case.system == OURS and case.checkpoint == "ours" else path,
        num_bytes=written.num_bytes,
        is_cold=case.is_cold,
    )
    ranks = common.call_ranks(case.num_ranks, run_load, task, timeout_s=timeout_s)
    if case.system != RAW and not math.isclose(ranks[0].total, written.total, rel_tol=1e-6):
        raise ValueError(f"loaded values sum to {ranks[0].total}, written were {written.total}")
    return max(rank.seconds for rank in ranks)


def name_of(case: Case) -> str:
    """A case in words."""
    return f"{case.system} of {case.checkpoint}, {case.num_ranks} ranks, {case.cache}"


def write(directory: Path, options: argparse.Namespace) -> Written:
    """Make the checkpoints."""
    common.say("writing two checkpoints")
    num_bytes = int(options.gb * 1e9)
    totals = common.call_ranks(
        options.ranks, write_checkpoints, directory, num_bytes, timeout_s=options.timeout_s
    )
    return Written(directory=directory, num_bytes=num_bytes, total=totals[0])


# Report ---------------------------------------------------------------------------------------------------------------

HEAD = ("load", "checkpoint", "ranks", "cache", "seconds (min-max)", "GB/s", "/ raw")


def row(case: Case, found: dict[Case, list[float]], num_bytes: int) -> list[str]:
    """One line of the table."""
    seconds = common.median(found[case])
    raw = common.median(found[Case(case.num_ranks, case.is_cold, RAW, case.checkpoint)])
    where = [case.checkpoint, f"{case.num_ranks}", case.cache]
    times = [common.spread(found[case]), f"{num_bytes / seconds / 1e9:.2f}", f"{seconds / raw:.2f}"]
    return [case.system, *where, *times]


def claims(found: dict[Case, list[float]]) -> dict[str, float]:
    """Ours over stock, each on a checkpoint of its own and on the other's."""
    ratios: dict[str, float] = {}
    for case, values in found.items():
        if case.system != OURS:
            continue
        for theirs in CHECKPOINTS:
            other = found[Case(case.num_ranks, case.is_cold, STOCK, theirs)]
            name = f"{case.num_ranks} rank(s), {case.cache}: ours of {case.checkpoint} / stock of {theirs}"
            ratios[name] = common.median(values) / common.median(other)
    return ratios


def report(
    written: Written,
    measured: tuple[dict[Case, list[float]], dict[Case, str]],
    options: argparse.Namespace,
) -> None:
    """The table, ratios, failures, and the file."""
    found, problems = measured
    num_bytes = sum(path.stat().st_size for path in limits.data_files(written.path("ours")))
    common.print_machine()
    print(
        f"{num_bytes / 1e9:.3f} GB of FSDP2 + AdamW state from {options.ranks} ranks; {options.rounds} rounds\n"
    )
    common.print_table(HEAD, [row(case, found, num_bytes) for case in found])
    print()
    ratios = claims(found)
    common.print_table(("ratio", "value"), [(name, f"{v:.3f}") for name, v in ratios.items()])
    for case, problem in problems.items():
        print(f"\nfailed: {name_of(case)}: {problem.strip().splitlines()[-1]}")
    seconds = {name_of(case): values for case, values in found.items()}
    common.write_json(
        options.json, options, {"num_bytes": num_bytes, "seconds": seconds, "ratios": ratios}
    )


def main() -> None:
    """Measure and print."""
    options = common.make_parser(__doc__ or "", gb=2.0, rounds=3, ranks=2).parse_args()
    with common.scratch(options.directory) as directory:
        written = write(directory, options)
        report(written, measure(written, options), options)


if __name__ == "__main__":
    main()
