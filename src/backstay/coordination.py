"""The ranks of one checkpointer: a gloo group of their own, agreement on it, and errors raised on all of them together.

Runs in: the training thread. Guarantees: no training collective ever meets one of ours, because nobody else has the group; every wait
has a limit, and whoever did not come is named. Assumes: all ranks make the same calls in the same order.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from backstay import errors
from backstay.errors import BackstayError, RankFailed, RankMissing

T = TypeVar("T")
# How long those who gave up wait for each other, to find out who is missing.
ROLL_CALL_S = 3.0
MAX_NAMED = 8
_serials = itertools.count()


@dataclass(frozen=True)
class Range:
    """Smallest and largest of the values that the ranks brought."""

    low: int
    high: int

    @property
    def is_same(self) -> bool:
        """Whether all ranks brought the same."""
        return self.low == self.high


class Coordination:
    """Collective operations among all ranks; in a process without torch.distributed there is one rank.

    Args:
        timeout_s: limit of each operation.

    Raises:
        RankMissing: by every operation, if some rank did not take part within the limit, or is gone.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if is_distributed else 0
        self.world_size: int = dist.get_world_size() if is_distributed else 1
        self._group: dist.ProcessGroup | None = None
        self._serial = next(_serials)
        self._num_calls = 0
        self._open()

    def agree(self, values: Sequence[int]) -> list[Range]:
        """The range of each value over all ranks: one reduction of fixed size, whatever the number of ranks.

        Args:
            values: as many on every rank, each within 63 bits and a sign.
        """
        if self.world_size == 1:
            return [Range(value, value) for value in values]
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64)
        self._call("agree", lambda group: dist.all_reduce(both, dist.ReduceOp.MIN, group=group))
        lows, highs = both[: len(values)].tolist(), both[len(values) :].tolist()
        return [Range(low, -high) for low, high in zip(lows, highs, strict=True)]

    def add(self, value: int) -> int:
        """Sum over all ranks, modulo 2**64, as a signed number."""
        total = torch.tensor([value], dtype=torch.int64)
        if self.world_size > 1:
            self._call("add", lambda group: dist.all_reduce(total, group=group))
        return int(total.item())

    def announce(self, value: int) -> int:
        """Rank 0's value, on all ranks; the others' is ignored."""
        told = torch.tensor([value], dtype=torch.int64)
        if self.world_size > 1:
            self._call("announce", lambda group: dist.broadcast(told, group_src=0, group=group))
        return int(told.item())

    def share(self, value: T) -> T:
        """Rank 0's object, on all ranks; the others' is ignored."""
        box: list[Any] = [value]
        if self.world_size > 1:
            self._call(
                "share", lambda group: dist.broadcast_object_list(box, group_src=0, group=group)
            )
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T] | None:
        """All ranks' objects on rank 0, in rank order; None elsewhere."""
        if self.world_size == 1:
            return [value]
        found: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._call(
            "gather", lambda group: dist.gather_object(value, found, group_dst=0, group=group)
        )
        return found

    def scatter(self, values: Sequence[T] | None) -> T:
        """One object for each rank, from rank 0."""
        if self.world_size == 1:
            assert values is not None, "rank 0 brings the values"
            return values[0]
        box: list[Any] = [None]
        given = None if values is None else list(values)
        self._call(
            "scatter", lambda group: dist.scatter_object_list(box, given, group_src=0, group=group)
        )
        return box[0]  # type: ignore[no-any-return]

    def exchange(self, value: T) -> list[T]:
        """All ranks' objects on all ranks, in rank order: not for a steady save, it grows with the number of ranks."""
        if self.world_size == 1:
            return [value]
        found: list[Any] = [None] * self.world_size
        self._call("exchange", lambda group: dist.all_gather_object(found, value, group=group))
        return found

    def raise_together(self, error: Exception | None) -> None:
        """Raise on all ranks if any brings an error; for calls where failing is rare, as it costs one reduction.

        Raises:
            BackstayError: of the class that all failing ranks share, if it is one of ours, else `RankFailed`.
        """
        (is_failed,) = self.agree([0 if error is None else 1])
        if is_failed.high:
            self.raise_exchanged(error)

    def raise_exchanged(self, error: Exception | None) -> None:
        """As `raise_together`, when it is known already that some rank failed."""
        report = None if error is None else (type(error).__name__, str(error))
        joint = join_errors(self.exchange(report))
        if joint is not None:
            raise joint from error

    def close(self) -> None:
        """Let go of the group; not collective."""
        self._drop()

    def _open(self) -> None:
        if self.world_size == 1:
            return
        limit = timedelta(seconds=self.timeout_s)
        # Not new_group: its counter must be the same on all ranks, and an attempt that fails on some moves it there only.
        # Ranks make the same calls, so the call's number names the group.
        name = f"backstay/{self._serial}/group/{self._num_calls}"
        store = dist.distributed_c10d.PrefixStore(name, dist.distributed_c10d._get_default_store())
        group = dist.ProcessGroup(store, self.rank, self.world_size)
        gloo = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, self.rank, self.world_size, limit)
        group._register_backend(torch.device("cpu"), gloo, backend)
        group._set_default_backend(gloo)
        self._group = group

    def _drop(self) -> None:
        self._group = None

    def _call(self, name: str, operation: Callable[[dist.ProcessGroup], object]) -> None:
        self._num_calls += 1
        began = time.monotonic()
        try:
            if self._group is None:
                # The last operation failed on all ranks, after which gloo connections are of no use.
                self._open()
            assert self._group is not None, "there is a group wherever there are several ranks"
            operation(self._group)
        except (RuntimeError, ValueError) as error:
            missing = self._find_missing()
            self._drop()
            waited_s = time.monotonic() - began
            raise RankMissing(describe_missing(name, missing, waited_s, self)) from error

    def _find_missing(self) -> list[int] | None:
        """Ranks that did not come to the present call, as far as the rendezvous store tells; None if it does not."""
        prefix = f"backstay/{self._serial}/{self._num_calls}"
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"{prefix}/{self.rank}", "here")
            return roll_call(store, prefix, self.world_size)
        except (RuntimeError, ValueError):
            return None


def roll_call(store: Any, prefix: str, world_size: int) -> list[int]:
    """The ranks that have not said that they are here, after a few seconds."""
    deadline = time.monotonic() + ROLL_CALL_S
    missing = list(range(world_size))
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not store.check([f"{prefix}/{rank}"])]
        time.sleep(0.05)
    return missing


def describe_missing(
    name: str, missing: list[int] | None, waited_s: float, ranks: Coordination
) -> str:
    """What is known about a collective operation that did not come to its end."""
    head = (
        f"rank {ranks.rank} of {ranks.world_size} waited {waited_s:.1f} s (limit {ranks.timeout_s:g} s) "
        f"for the other ranks ({name})"
    )
    if missing is None:
        return f"{head}; the rendezvous store is gone, so the missing rank is not known"
    if not missing:
        return f"{head}; all were there, but too late or with a broken connection"
    return f"{head}; missing: {name_ranks(missing)}. They died, or never made this call: look at their logs"


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, however many there are."""
    word = "rank" if len(ranks) == 1 else "ranks"
    shown = ", ".join(map(str, ranks[:MAX_NAMED]))
    rest = "" if len(ranks) <= MAX_NAMED else f" and {len(ranks) - MAX_NAMED} more"
    return f"{word} {shown}{rest}"


def join_errors(reports: Sequence[tuple[str, str] | None]) -> BackstayError | None:
    """One error out of what the ranks report, the same on all of them.

    Args:
        reports: class name and message of each rank's error, None for a rank without one.
    """
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return None
    kinds = {kind for kind, _ in failed.values()}
    cls = getattr(errors, next(iter(kinds))) if len(kinds) == 1 and _is_ours(kinds) else RankFailed
    messages: dict[str, list[int]] = {}
    for rank, (kind, text) in failed.items():
        message = text if _is_ours({kind}) else f"{kind}: {text}"
        messages.setdefault(message, []).append(rank)
    if len(messages) == 1 and len(failed) == len(reports):
        return cls(next(iter(messages)))
    lines = [f"{name_ranks(ranks)}: {message}" for message, ranks in messages.items()]
    return cls("\n".join(lines[:MAX_NAMED]))


def _is_ours(kinds: set[str]) -> bool:
    found = [getattr(errors, kind, None) for kind in kinds]
    return all(isinstance(each, type) and issubclass(each, BackstayError) for each in found)
