"""What planning and agreeing cost as ranks become many: `python -m benchmarks.plan [--world-sizes 1 8 64 256 1024]`.

No machine here has 1,024 ranks, so the first table simulates them. Rank 0's part is real: a GPT of about 300 parameters under FSDP2 and AdamW in a
process group of that size whose collectives do nothing. The other ranks' plans have the same entries at other offsets, as FSDP2 would
cut them.

local plan   what one rank's DCP planner makes of its own state, in parallel on all ranks
gathered     size of all ranks' plans, pickled, as rank 0 receives them, and the seconds to unpickle them
joint plan   `make_rank_plans` on rank 0: deduplicate, lay out every rank, build `.metadata`
scattered    size of all answers, pickled
steady       what the training thread does in a save that needs no new plan: collect, sign and compare, hash what ranks share

The second table is a real agreement (`Coordination.agree`) of processes on this machine; more of them than cores wait for each other.
"""

import argparse
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from backstay.coordination import Coordination
from backstay.gc_pause import pause_gc
from backstay.save.compare import Shared, hash_steady
from backstay.save.plan import (
    LocalPlan,
    Plan,
    RankPlan,
    make_local_plan,
    make_rank_plans,
    sign,
)
from backstay.save.planned import PlannedImage
from backstay.state import Collector, TrainState
from benchmarks import common, trainings
from benchmarks.trainings import Gpt

# 6 tensors in each block, and 3 others.
NUM_LAYERS = 50
NUM_REPEATS = 20
NOTHING_OWN: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Seconds and bytes for one world size."""

    world_size: int
    num_tensors: int
    local_plan_s: float
    gathered_bytes: int
    unpickle_s: float
    joint_plan_s: float
    scattered_bytes: int
    metadata_bytes: int
    collect_s: list[float]
    compare_s: list[float]
    hash_s: list[float]


# Simulated ranks ------------------------------------------------------------------------------------------------------


def plan_many(_: int, __: int, world_size: int, dim: int) -> Planned:
    """Rank 0 of a simulated world; runs in a process of its own."""
    pretend(world_size)
    with torch.device("meta"):
        model = Gpt(num_layers=NUM_LAYERS, dim=dim, num_tokens=2 * dim)
    training = trainings.shard(model, model.blocks)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()
    collector = Collector(TrainState(model=model, optimizer=training.optimizer))
    found = collector.collect()

    began = time.perf_counter()
    local = make_local_plan(found, rank=0, own=NOTHING_OWN, shared=Shared(), trainable_only=False)
    local_plan_s = time.perf_counter() - began

    gathered = [pickle.dumps(plan) for plan in simulate(local, world_size)]
    began = time.perf_counter()
    with pause_gc():
        plans = [pickle.loads(data) for data in gathered]
    unpickle_s = time.perf_counter() - began
    began = time.perf_counter()
    with pause_gc():
        rank_plans = make_rank_plans(plans)
    joint_plan_s = time.perf_counter() - began

    first = rank_plans[0]
    return Planned(
        world_size=world_size,
        num_tensors=len(found.tensors),
        local_plan_s=local_plan_s,
        gathered_bytes=sum(map(len, gathered)),
        unpickle_s=unpickle_s,
        joint_plan_s=joint_plan_s,
        scattered_bytes=sum(len(pickle.dumps(plan)) for plan in rank_plans),
        metadata_bytes=len(first.metadata),
        **measure_steady(collector, first),
    )


def pretend(world_size: int) -> None:
    """Be rank 0 of a group in which nobody else is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def simulate(first: LocalPlan, world_size: int) -> list[LocalPlan]:
    """All ranks' plans, out of rank 0's."""
    shared = [item for item in first.plan.items if item.type is WriteItemType.TENSOR]
    sharded = [item for item in first.plan.items if item.type is WriteItemType.SHARD]
    others = [
        LocalPlan(
            plan=SavePlan([*(move(item, rank, world_size) for item in sharded), *shared]),
            frozen=first.frozen,
            slots={},
            aliases=first.aliases,
            placements=first.placements,
            opaque=first.opaque,
        )
        for rank in range(1, world_size)
    ]
    return [first, *others]


def move(item: WriteItem, rank: int, world_size: int) -> WriteItem:
    """The same tensor's shard on another rank: FSDP2 cuts the first dimension as `torch.chunk` does."""
    assert item.tensor_data is not None, "a shard is of a tensor"
    num_rows, *rest = item.tensor_data.size
    per_rank = -(-num_rows // world_size)
    start = min(rank * per_rank, num_rows)
    stop = min(start + per_rank, num_rows)
    offsets = torch.Size([start, *(0 for _ in rest)])
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([stop - start, *rest]))
    return replace(
        item,
        index=MetadataIndex(item.index.fqn, offsets),
        tensor_data=replace(item.tensor_data, chunk=chunk),
    )


def measure_steady(collector: Collector, rank_plan: RankPlan) -> dict[str, list[float]]:
    """What each save costs the training thread before it copies."""
    found = collector.collect()
    plan = Plan(signature=sign(found), rank_plan=rank_plan, own=NOTHING_OWN, apart=NOTHING_OWN)
    planned = PlannedImage(0, lambda *_: None)
    planned.adopt(plan, found)
    assert planned.fits(found), "nothing has changed"
    times = {
        "collect_s": repeat(collector.collect),
        "compare_s": repeat(lambda: planned.fits(found)),
        "hash_s": repeat(lambda: hash_steady(found, NOTHING_OWN)),
    }
    planned.close()
    return times


def repeat(work: Callable[[], object], *, num_times: int = NUM_REPEATS) -> list[float]:
    """Seconds of each time, after one that does not count."""
    work()
    found = []
    for _ in range(num_times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


# Real ranks -----------------------------------------------------------------------------------------------------------


def agree_often(rank: int, num_ranks: int, num_times: int) -> list[float]:
    """Seconds of each agreement in this rank."""
    ranks = Coordination(timeout_s=60.0)
    values = [1, 2, 3, 4, 0, 0, 0]
    found = repeat(lambda: ranks.agree(values), num_times=num_times)
    ranks.close()
    return found


# Report ---------------------------------------------------------------------------------------------------------------

HEAD = (
    "ranks",
    "local plan",
    "gathered",
    "unpickle",
    "joint plan",
    "scattered",
    ".metadata",
    "steady",
    "collect",
    "compare",
    "hash",
)


def row(runs: list[Planned]) -> list[str]:
    """One line: medians over rounds."""
    first = runs[0]
    steady = [common.median(pool(runs, name)) for name in ("collect_s", "compare_s", "hash_s")]
    return [
        str(first.world_size),
        common.seconds(common.median([run.local_plan_s for run in runs])),
        megabytes(first.gathered_bytes),
        common.seconds(common.median([run.unpickle_s for run in runs])),
        common.seconds(common.median([run.joint_plan_s for run in runs])),
        megabytes(first.scattered_bytes),
        megabytes(first.metadata_bytes),
        common.seconds(sum(steady)),
        *map(common.seconds, steady),
    ]


def pool(runs: list[Planned], name: str) -> list[float]:
    """The times of all rounds."""
    return [value for run in runs for value in getattr(run, name)]


def megabytes(num_bytes: int) -> str:
    """A size."""
    return f"{num_bytes / 1e6:.2f} MB"


def report(
    planned: dict[int, list[Planned]],
    agreed: dict[int, list[list[float]]],
    options: argparse.Namespace,
) -> None:
    """Both tables and the file."""
    common.print_machine()
    num_tensors = next(iter(planned.values()))[0].num_tensors if planned else 0
    print(f"{num_tensors} tensors of a GPT with AdamW, sharded by FSDP2; {options.rounds} rounds\n")
    common.print_table(HEAD, [row(runs) for runs in planned.values()])
    print()
    rows = [
        (str(size), common.seconds(common.median(flat)), common.seconds(quantile(flat)))
        for size, flat in ((size, [*chain(*runs)]) for size, runs in agreed.items())
    ]
    common.print_table(("real ranks", "agreement, median", "99 of 100 within"), rows)
    plans = {str(size): [asdict(run) for run in runs] for size, runs in planned.items()}
    common.write_json(options.json, options, {"plans": plans, "agreements": agreed})


def quantile(values: Sequence[float], share: float = 0.99) -> float:
    """The value below which that share lies."""
    return sorted(values)[int(share * (len(values) - 1))]


def measure(
    options: argparse.Namespace,
) -> tuple[dict[int, list[Planned]], dict[int, list[list[float]]]]:
    """All rounds."""
    planned: dict[int, list[Planned]] = {size: [] for size in options.world_sizes}
    agreed: dict[int, list[list[float]]] = {size: [] for size in options.real_sizes}
    limit = {"timeout_s": options.timeout_s}
    for number in range(options.rounds):
        for size, runs in planned.items():
            common.say(f"round {number + 1} of {options.rounds}: {size} simulated ranks")
            task = (size, options.dim)
            runs += common.call_ranks(1, plan_many, *task, distributed=False, **limit)
        for size, times in agreed.items():
            common.say(f"round {number + 1} of {options.rounds}: {size} real ranks")
            times += common.call_ranks(size, agree_often, options.agreements, **limit)
    return planned, agreed


def main() -> None:
    """Measure and print."""
    parser = common.make_parser(__doc__ or "", gb=None, rounds=3, ranks=None)
    sizes = {"type": int, "nargs": "*"}
    parser.add_argument("--world-sizes", default=[1, 8, 64, 256, 1024], help="simulated", **sizes)
    parser.add_argument("--real-sizes", default=[1, 2, 4, 8], help="real processes", **sizes)
    parser.add_argument("--dim", type=int, default=512, help="width of the model (512)")
    parser.add_argument("--agreements", type=int, default=200, help="in each process (200)")
    options = parser.parse_args()
    report(*measure(options), options)


if __name__ == "__main__":
    main()
