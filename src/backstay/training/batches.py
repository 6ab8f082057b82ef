"""Micro-batches: token stores and an order of samples in, padded tensors out, read ahead by worker processes if wanted.

Runs in: the training process, and in loader workers forked from it. Guarantees: workers outlive SIGTERM and SIGUSR1, which reach the whole process
group but concern the trainer alone; reading ahead moves no position.
"""

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from backstay.training.packing import pack
from backstay.training.sampler import NO_SAMPLE, BatchShape, ResumableSampler
from backstay.training.tokens import TokenStore, TooLong

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to train on."""

    # JSONL files; one, or several as [a.jsonl, b.jsonl]
    train: tuple[str, ...]
    # how often each file comes in an epoch, by default once
    weights: tuple[float, ...] = ()
    # held-out JSONL files for evaluation
    eval: tuple[str, ...] = ()
    # longest sequence, in tokens
    seq_len: int = 1024
    # put several samples into one sequence, each seeing itself only
    packing: bool = True
    # samples longer than seq_len
    too_long: TooLong = "truncate"
    # put prompt/completion rows through the chat template, too; chats always are
    use_template: bool = True
    # for tokenizers without one, a token of theirs to fill up batches with
    pad_token: str | None = None
    shuffle: bool = True
    # processes per rank that prepare batches
    num_workers: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes at a time.

    Attributes:
        ids: (rows, length) token ids.
        positions: (rows, length); begin at 0 with each document, by which models tell documents apart.
        targets: (rows, kept) next tokens at the kept places, `IGNORED` where there is no loss.
        kept: (kept,) places along the length where any row has a loss.
        num_targets: number of tokens with a loss.
        num_tokens: number of tokens that are no padding.
        sample_ids: what the rows are made of, as the sampler counts.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    kept: Tensor
    num_targets: int
    num_tokens: int
    sample_ids: tuple[int, ...]

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """The same in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        tensors: dict[str, Any] = {
            name: fn(value) for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True)
class Row:
    """One sequence, not padded."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    sample_id: int


class Sequences(Dataset[Row]):
    """The sequences of several token stores, laid end to end; a sequence is a sample, or several that were packed.

    Args:
        capacity: of a packed sequence; None does not pack.
    """

    def __init__(self, stores: Sequence[TokenStore], *, capacity: int | None) -> None:
        self.stores = stores
        self.members: list[list[list[int]]] = [
            [[index] for index in range(len(store))]
            if capacity is None
            else pack(store.lengths(), capacity)
            for store in stores
        ]
        self.sizes = [len(members) for members in self.members]

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> Row:
        if index == NO_SAMPLE:
            nothing = torch.zeros(1, dtype=torch.int64)
            return Row(nothing, nothing, torch.full((1,), IGNORED), NO_SAMPLE)
        number, inside = self._place(index)
        store = self.stores[number]
        documents = [store[member] for member in self.members[number][inside]]
        ids = torch.from_numpy(np.concatenate([ids for ids, _ in documents]).astype(np.int64))
        positions = torch.cat([torch.arange(len(ids)) for ids, _ in documents])
        targets = torch.full_like(ids, IGNORED)
        learnt = torch.from_numpy(np.concatenate([learnt for _, learnt in documents]))
        # A token is predicted by the one before, but never across the border of a document.
        is_predicted = learnt[1:] & (positions[1:] > 0)
        targets[:-1] = torch.where(is_predicted, ids[1:], IGNORED)
        return Row(ids, positions, targets, index)

    def members_of(self, index: int) -> list[tuple[int, int]]:
        """Which samples, as (store, sample), a sequence holds."""
        number, inside = self._place(index)
        return [(number, member) for member in self.members[number][inside]]

    def _place(self, index: int) -> tuple[int, int]:
        for number, size in enumerate(self.sizes):
            if index < size:
                return number, index
            index -= size
        raise IndexError(index)


@dataclass(frozen=True)
class Collate:
    """Rows to a micro-batch; an object, so that workers can be sent it."""

    pad_id: int
    length: int | None = None

    def __call__(self, rows: list[Row]) -> MicroBatch:
        length = self.length or max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), length), self.pad_id)
        positions = torch.zeros_like(ids)
        targets = torch.full_like(ids, IGNORED)
        for number, row in enumerate(rows):
            used = len(row.ids)
            ids[number, :used] = row.ids
            targets[number, :used] = row.targets
            positions[number, :used] = row.positions
            # Padding comes last, where causal attention cannot see it from any token that counts. In a sequence of one document it goes on
            # counting, so that fast unmasked attention stays possible; in a pack it is a document of its own.
            start = used if not is_pack(row.positions) else 0
            positions[number, used:] = torch.arange(start, start + length - used)
        kept = (targets != IGNORED).any(0).nonzero().flatten()
        if not len(kept):
            kept = torch.zeros(1, dtype=torch.int64)
        return MicroBatch(
            ids=ids,
            positions=positions,
            targets=targets[:, kept],
            kept=kept,
            num_targets=int((targets != IGNORED).sum()),
            num_tokens=sum(len(row.ids) for row in rows if row.sample_id != NO_SAMPLE),
            sample_ids=tuple(row.sample_id for row in rows),
        )


def is_pack(positions: Tensor) -> bool:
    """Whether there is more than one document."""
    return int(positions[-1]) != len(positions) - 1


UnitT = TypeVar("UnitT")
BatchT = TypeVar("BatchT", bound=MicroBatch)


def load_batches(
    units: Dataset[UnitT],
    plan: Iterator[list[int]],
    collate: Callable[[list[UnitT]], BatchT],
    *,
    num_workers: int = 0,
    pin: bool = False,
) -> Iterator[BatchT]:
    """Micro-batches as planned; the end of the plan ends them.

    Args:
        units: what batches are made of: sequences, or pairs of them.
        plan: indices of the units of each micro-batch, see `ResumableSampler.micro_batches`.
        num_workers: processes that prepare them ahead.
        pin: put them into page-locked memory, for asynchronous copies to a GPU.
    """
    loader: DataLoader[BatchT] = DataLoader(
        units,  # type: ignore[arg-type]
        batch_sampler=plan,
        collate_fn=collate,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
        worker_init_fn=ignore_signals,
        # Else each loader draws its seed from the generator that dropout uses.
        generator=torch.Generator(),
    )
    for batch in loader:
        yield batch.pinned() if pin else batch


def ignore_signals(_: int) -> None:
    """In a loader worker: leave it to the trainer when to stop."""
    for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    torch.set_num_threads(1)


def plan_eval(size: int, shape: BatchShape) -> Iterator[list[int]]:
    """This rank's micro-batches of one pass in order; every rank gets as many."""
    return ResumableSampler([size], shuffle=False).micro_batches(shape, end=size)
