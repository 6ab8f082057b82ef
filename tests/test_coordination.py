"""Ranks agree, fail together, and learn who is missing; training collectives are never in the way."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backstay.coordination import Coordination, Range, join_errors, name_ranks
from backstay.errors import (
    BackstayError,
    CorruptCheckpoint,
    RankFailed,
    RankMissing,
    StateError,
    StateMismatch,
)
from backstay.testing import run_ranks

BIG = 2**63 - 1
# What survivors wait at most: the limit of the operation, the roll call, and a slow machine.
SLACK_S = 15.0


def message_of(function: Callable[[], object], cls: type[BackstayError] = RankMissing) -> str:
    with pytest.raises(cls) as caught:
        function()
    assert type(caught.value) is cls
    return str(caught.value)


# Operations -----------------------------------------------------------------------------------------------------------


def agree(rank: int, world_size: int) -> list[Range]:
    return Coordination(timeout_s=30).agree([rank, -rank, 7, 5 - 10 * (rank == 1), BIG, -BIG])


def test_agreement_gives_the_range_of_each_value() -> None:
    expected = [
        Range(0, 2),
        Range(-2, 0),
        Range(7, 7),
        Range(-5, 5),
        Range(BIG, BIG),
        Range(-BIG, -BIG),
    ]
    assert run_ranks(3, agree) == [expected] * 3


def test_a_range_of_one_value_is_the_same() -> None:
    assert Range(-3, -3).is_same
    assert not Range(-3, 3).is_same


def add(rank: int, world_size: int) -> list[int]:
    ranks = Coordination(timeout_s=30)
    return [ranks.add(value) for value in (rank - 5, BIG, -(2**63), 2**62)]


def test_sums_wrap_around_at_64_bits() -> None:
    wrapped = [-12, 3 * BIG, -3 * 2**63, 3 * 2**62]
    expected = [(value + 2**63) % 2**64 - 2**63 for value in wrapped]
    assert run_ranks(3, add) == [expected] * 3


def pass_objects(rank: int, world_size: int) -> dict[str, Any]:
    ranks = Coordination(timeout_s=30)
    return {
        "announce": ranks.announce(-rank - 1),
        "share": ranks.share({"from": rank, "blob": bytes(rank + 1000)}),
        "gather": ranks.gather(("of", rank)),
        "scatter": ranks.scatter([f"for {i}" for i in range(world_size)] if rank == 0 else None),
        "exchange": ranks.exchange("x" * 10**rank),
        "none": ranks.exchange(None),
    }


def test_objects_go_where_they_should() -> None:
    found = run_ranks(3, pass_objects)
    for rank, each in enumerate(found):
        assert each["announce"] == -1
        assert each["share"] == {"from": 0, "blob": bytes(1000)}
        assert each["gather"] == ([("of", 0), ("of", 1), ("of", 2)] if rank == 0 else None)
        assert each["scatter"] == f"for {rank}"
        assert each["exchange"] == ["x", "x" * 10, "x" * 100]
        assert each["none"] == [None] * 3


def test_a_process_without_torch_distributed_is_one_rank() -> None:
    ranks = Coordination(timeout_s=1)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.agree([3, -3]) == [Range(3, 3), Range(-3, -3)]
    assert (ranks.add(-4), ranks.announce(5), ranks.share("a")) == (-4, 5, "a")
    assert (ranks.gather("b"), ranks.scatter(["c"]), ranks.exchange("d")) == (["b"], "c", ["d"])
    ranks.raise_together(None)
    with pytest.raises(StateError, match=r"^just me$"):
        ranks.raise_together(StateError("just me"))
    ranks.close()


def open_and_close(rank: int, world_size: int) -> list[int]:
    return [use_once(rank) for _ in range(5)]


def use_once(rank: int) -> int:
    ranks = Coordination(timeout_s=30)
    total = ranks.add(rank)
    ranks.close()
    ranks.close()
    return total


def test_closing_lets_the_next_one_open() -> None:
    assert run_ranks(2, open_and_close) == [[1] * 5] * 2


# Errors together ------------------------------------------------------------------------------------------------------


def fail_together(rank: int, world_size: int, errors: dict[int, Exception]) -> tuple[str, str, str]:
    ranks = Coordination(timeout_s=30)
    try:
        ranks.raise_together(errors.get(rank))
    except BackstayError as error:
        assert ranks.add(1) == world_size, "the group is still of use"
        return type(error).__name__, str(error), repr(error.__cause__)
    return "", "", ""


def test_nobody_raises_where_nobody_failed() -> None:
    assert run_ranks(2, fail_together, {}) == [("", "", "")] * 2


def test_a_class_that_all_failing_ranks_share_is_raised_on_all() -> None:
    errors = {0: StateMismatch("no a"), 2: StateMismatch("no b")}
    found = run_ranks(3, fail_together, errors)
    assert {kind for kind, _, _ in found} == {"StateMismatch"}
    assert {text for _, text, _ in found} == {"rank 0: no a\nrank 2: no b"}
    assert [cause for _, _, cause in found] == [
        "StateMismatch('no a')",
        "None",
        "StateMismatch('no b')",
    ]


def test_what_all_ranks_report_alike_is_said_once() -> None:
    errors = {rank: CorruptCheckpoint("short file") for rank in range(3)}
    assert {each[:2] for each in run_ranks(3, fail_together, errors)} == {
        ("CorruptCheckpoint", "short file")
    }


@pytest.mark.parametrize(
    "errors",
    [
        {1: OSError("disk gone")},
        {1: OSError("disk gone"), 2: StateError("odd")},
        {1: StateMismatch("disk gone"), 2: StateError("odd")},
    ],
    ids=["foreign", "foreign and ours", "two of ours"],
)
def test_mixed_and_foreign_errors_become_rank_failed(errors: dict[int, Exception]) -> None:
    found = run_ranks(3, fail_together, errors)
    assert {kind for kind, _, _ in found} == {"RankFailed"}
    (text,) = {text for _, text, _ in found}
    for rank, error in errors.items():
        assert re.search(f"^rank {rank}: .*{error}$", text, re.MULTILINE)


def test_a_foreign_error_is_named_with_its_class() -> None:
    joint = join_errors([None, ("KeyError", "'a'"), ("KeyError", "'a'")])
    assert type(joint) is RankFailed
    assert str(joint) == "ranks 1, 2: KeyError: 'a'"


def test_a_foreign_error_on_all_ranks_is_rank_failed_too() -> None:
    joint = join_errors([("KeyError", "'a'")] * 2)
    assert type(joint) is RankFailed
    assert "KeyError: 'a'" in str(joint)


@pytest.mark.parametrize("kind", ["errors", "annotations", "__doc__", "Exception", "type"])
def test_a_class_that_only_sounds_like_ours_is_foreign(kind: str) -> None:
    assert type(join_errors([(kind, "x")])) is RankFailed


def test_an_error_of_many_ranks_stays_short() -> None:
    joint = join_errors([("StateError", f"message {rank}") for rank in range(1000)])
    assert len(str(joint).splitlines()) == 8


def test_many_ranks_are_named_briefly() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([3, 4]) == "ranks 3, 4"
    assert name_ranks(range(1000)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 992 more"


# Who is missing -------------------------------------------------------------------------------------------------------


def lose_a_rank(rank: int, world_size: int, lost: int, name: str) -> tuple[str, float]:
    """One rank dies without a word; the others call."""
    ranks = Coordination(timeout_s=5)
    ranks.agree([1])
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    return message_of(lambda: call(ranks, name)), time.monotonic() - began


def call(ranks: Coordination, name: str) -> object:
    calls: dict[str, Callable[[], object]] = {
        "agree": lambda: ranks.agree([1]),
        "exchange": lambda: ranks.exchange("a"),
    }
    return calls[name]()


@pytest.mark.parametrize(("lost", "name"), [(0, "agree"), (2, "exchange")])
def test_a_rank_that_died_is_named_by_all_others(lost: int, name: str) -> None:
    found = run_ranks(3, lose_a_rank, lost, name, allow_death={lost})
    assert found.pop(lost) == "killed by signal 9"
    for text, waited_s in found:
        assert f"missing: rank {lost}. " in text
        assert f"({name})" in text
        assert waited_s < SLACK_S


def stay_away(rank: int, world_size: int) -> str:
    """Rank 1 lives, but never calls."""
    ranks = Coordination(timeout_s=2)
    text = "" if rank == 1 else message_of(lambda: ranks.agree([rank]))
    dist.barrier()
    return text


def test_a_rank_that_lives_but_never_calls_is_named() -> None:
    found = run_ranks(3, stay_away)
    for rank in (0, 2):
        assert "missing: rank 1. They died, or never made this call" in found[rank]
        assert f"rank {rank} of 3 waited" in found[rank]
        assert "(limit 2 s)" in found[rank]


def two_stay_away(rank: int, world_size: int) -> str:
    ranks = Coordination(timeout_s=1)
    text = "" if rank in (0, 2) else message_of(lambda: ranks.exchange(rank))
    dist.barrier()
    return text


def test_all_missing_ranks_are_named() -> None:
    found = run_ranks(4, two_stay_away)
    assert all("missing: ranks 0, 2. " in found[rank] for rank in (1, 3))


def come_too_late(rank: int, world_size: int) -> tuple[str, int]:
    """Rank 1 makes the call when the others have given up; the next call is made by all."""
    ranks = Coordination(timeout_s=2)
    text = "" if rank == 1 else message_of(lambda: ranks.agree([rank]))
    dist.barrier()
    if rank == 1:
        text = message_of(lambda: ranks.agree([rank]))
    total = ranks.add(rank)
    assert ranks.exchange(rank) == [*range(world_size)]
    return text, total


def test_after_a_timeout_all_ranks_go_on_with_a_new_group() -> None:
    found = run_ranks(3, come_too_late)
    assert [total for _, total in found] == [3, 3, 3]
    assert "missing: rank 1" in found[0][0]
    assert "all were there, but too late" in found[1][0]


def call_again_without_the_dead(rank: int, world_size: int) -> list[str]:
    ranks = Coordination(timeout_s=2)
    if rank == 1:
        os._exit(3)
    return [message_of(lambda: ranks.agree([1])) for _ in range(2)]


def test_every_later_call_names_the_dead_rank_too() -> None:
    first, death, last = run_ranks(3, call_again_without_the_dead, allow_death={1})
    assert death == "exited with code 3"
    assert all("missing: rank 1" in text for text in [*first, *last])


def give_up_twice(rank: int, world_size: int) -> int:
    """Rank 1 misses two calls of the others; training then makes a group of its own."""
    ranks = Coordination(timeout_s=2)
    for _ in range(2):
        if rank != 1:
            message_of(lambda: ranks.agree([rank]))
        dist.barrier()
    group = dist.new_group()
    total = torch.tensor(rank)
    dist.all_reduce(total, group=group)
    return int(total)


def test_training_can_still_make_groups_after_two_timeouts() -> None:
    assert run_ranks(3, give_up_twice, timeout_s=40) == [3, 3, 3]


# Beside training ------------------------------------------------------------------------------------------------------


def train_beside(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Both kinds of collectives at once, in an order that differs between ranks."""
    ranks = Coordination(timeout_s=30)
    sums: list[int] = []

    def train() -> None:
        for step in range(200):
            total = torch.tensor(rank * 1000 + step)
            dist.all_reduce(total)
            sums.append(int(total))

    training = threading.Thread(target=train)
    training.start()
    found = []
    for step in range(40):
        found.append(ranks.add(rank + step))
        assert ranks.agree([step, rank]) == [Range(step, step), Range(0, world_size - 1)]
        assert ranks.exchange((rank, step)) == [(each, step) for each in range(world_size)]
    training.join()
    return sums, found


def test_p01_training_collectives_never_meet_ours() -> None:
    """P01: two threads per rank, one of them training on the default group."""
    expected = [3000 + 3 * step for step in range(200)], [3 + 3 * step for step in range(40)]
    assert run_ranks(3, train_beside) == [expected] * 3


def hold_training_back(rank: int, world_size: int) -> int:
    """On rank 0 a training collective is under way, waiting for rank 1, which is in one of ours first."""
    ranks = Coordination(timeout_s=20)
    total = torch.tensor(rank + 1)
    if rank == 0:
        work = dist.all_reduce(total, async_op=True)
        ranks.raise_together(None)
        work.wait()
    else:
        ranks.raise_together(None)
        dist.all_reduce(total)
    return int(total)


def test_p01_a_training_collective_under_way_does_not_block_ours() -> None:
    """P01: the order differs between ranks for certain, not by chance."""
    assert run_ranks(2, hold_training_back) == [3, 3]


def open_beside_training(rank: int, world_size: int) -> int:
    """The group is made while a training collective of rank 0 waits for rank 1."""
    total = torch.tensor(rank + 1)
    work = dist.all_reduce(total, async_op=True) if rank == 0 else None
    found = Coordination(timeout_s=20).add(rank)
    if work is None:
        dist.all_reduce(total)
    else:
        work.wait()
    return int(total) * 10 + found


def test_p01_a_training_collective_under_way_does_not_block_the_making_of_the_group() -> None:
    assert run_ranks(2, open_beside_training) == [31, 31]


def use_only_its_group(rank: int, world_size: int) -> int:
    """The default group hears nothing: an operation of ours after its end still works."""
    ranks = Coordination(timeout_s=20)
    default = dist.distributed_c10d._get_default_group()
    before = default._get_sequence_number_for_group()
    ranks.agree([1])
    ranks.exchange("a")
    ranks.share("b")
    ranks.gather("c")
    ranks.scatter(["d"] * world_size)
    return default._get_sequence_number_for_group() - before


def test_no_operation_runs_on_the_default_group() -> None:
    assert run_ranks(2, use_only_its_group) == [0, 0]
