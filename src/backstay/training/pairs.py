"""Pairs of sequences, a chosen and a rejected one: token stores of pairs in, batches for preference optimisation out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from backstay.training.batches import Collate, Row, Sequences
from backstay.training.sampler import NO_SAMPLE
from backstay.training.tokens import TokenStore


@dataclass(frozen=True)
class PairBatch:
    """What one rank computes at a time: the rows of all chosen sequences, then those of all rejected ones.

    Attributes:
        ids, positions: (2 pairs, length), see `MicroBatch`.
        targets: (2 pairs, kept) next tokens at the kept places, `IGNORED` outside the answers.
        kept: (kept,) places along the length where any row has a target.
        weights: (pairs,) in float32, 0 for what only fills up the last batch, else 1.
        num_targets: number of pairs, without those that only fill up: what the loss is divided by.
        num_tokens: number of tokens that are no padding, of both sides.
        sample_ids: which pairs these are, as the sampler counts.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    kept: Tensor
    weights: Tensor
    num_targets: int
    num_tokens: int
    sample_ids: tuple[int, ...]

    def to(self, device: torch.device) -> "PairBatch":
        """The same on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "PairBatch":
        """The same in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, fn: Callable[[Tensor], Tensor]) -> "PairBatch":
        return replace(
            self,
            ids=fn(self.ids),
            positions=fn(self.positions),
            targets=fn(self.targets),
            kept=fn(self.kept),
            weights=fn(self.weights),
        )


class Pairs(Dataset[tuple[Row, Row]]):
    """The pairs of several token stores, laid end to end; never packed, as each pair has a loss of its own.

    Args:
        stores: made with `Tokenizing(kind="pairs")`.
    """

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        for store in stores:
            assert len(store) % 2 == 0, f"{store.path} is no store of pairs"
        self.stores = stores
        self.sizes = [len(store) // 2 for store in stores]
        self._sequences = Sequences(stores, capacity=None)

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> tuple[Row, Row]:
        """The chosen and the rejected sequence."""
        if index == NO_SAMPLE:
            nothing = self._sequences[NO_SAMPLE]
            return nothing, nothing
        chosen, rejected = self._sequences[2 * index], self._sequences[2 * index + 1]
        return replace(chosen, sample_id=index), replace(rejected, sample_id=index)

    def members_of(self, index: int) -> list[tuple[int, int]]:
        """Which samples, as (store, sample), a pair holds."""
        return [
            member
            for number in (2 * index, 2 * index + 1)
            for member in self._sequences.members_of(number)
        ]


@dataclass(frozen=True)
class CollatePairs:
    """Pairs to a batch; an object, so that workers can be sent it."""

    pad_id: int
    length: int | None = None

    def __call__(self, pairs: list[tuple[Row, Row]]) -> PairBatch:
        chosen, rejected = ([pair[side] for pair in pairs] for side in (0, 1))
        rows = Collate(self.pad_id, self.length)(chosen + rejected)
        sample_ids = tuple(row.sample_id for row in chosen)
        is_real = [number != NO_SAMPLE for number in sample_ids]
        return PairBatch(
            ids=rows.ids,
            positions=rows.positions,
            targets=rows.targets,
            kept=rows.kept,
            weights=torch.tensor(is_real, dtype=torch.float32),
            num_targets=sum(is_real),
            num_tokens=rows.num_tokens,
            sample_ids=sample_ids,
        )
