"""Pairs of sequences, a chosen and a rejected one: token stores of pairs in, batches for preference optimisation out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from backstay.training.batches import Collate, MicroBatch, Row, Sequences
from backstay.training.sampler import NO_SAMPLE
from backstay.training.tokens import TokenStore


@dataclass(frozen=True)
class PairBatch(MicroBatch):
    """What one rank computes at a time: the rows of all chosen sequences, then those of all rejected ones.

    `num_targets` is the number of pairs, without those that only fill up; `sample_ids` says which pairs these are.

    Attributes:
        weights: (pairs,) in float32, 0 for what only fills up the last batch, else 1.
    """

    weights: Tensor


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
            num_targets=sum(is_real),
            num_tokens=rows.num_tokens,
            sample_ids=sample_ids,
            weights=torch.tensor(is_real, dtype=torch.float32),
        )
