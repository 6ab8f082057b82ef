"""ResumableSampler: which samples come next, from one integer.

The integer counts samples taken by all ranks together since the start. Everything else follows from it, so that ranks, loader workers,
prefetching, micro-batches and accumulation may all change between a save and its restoration, and each sample still comes once per epoch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backstay.errors import ConfigChanged, DataError

Order = npt.NDArray[np.int64]
# Stands for a sample in the last batch of a run when there are none left.
NO_SAMPLE = -1


@dataclass(frozen=True)
class BatchShape:
    """How a batch is divided.

    Attributes:
        batch_size: samples per optimizer update, over all ranks.
        micro_batch_size: samples per rank and forward pass.
    """

    batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int

    @property
    def num_micro_batches(self) -> int:
        """Forward passes per optimizer update."""
        return self.batch_size // (self.micro_batch_size * self.world_size)


class ResumableSampler:
    """The order of samples over all epochs, and the position in it.

    Args:
        sizes: number of samples of each data set.
        weights: how often each data set comes in an epoch: 1 is once, 0.5 every other sample, 2 all of them twice. A fraction walks on from
            epoch to epoch, so that all samples come equally often.
        seed: of the order.
        shuffle: False keeps the order of the files.

    Attributes:
        position: samples that all ranks together have trained on.
        accepts_other_orders: take over a position in another order as well, though some samples will then come more often than others.

    Raises:
        DataError: there is nothing to sample.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Sequence[float] = (),
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.sizes = tuple(sizes)
        self.weights = tuple(weights) or (1.0,) * len(self.sizes)
        self.seed = seed
        self.shuffle = shuffle
        self.position = 0
        self.accepts_other_orders = False
        pairs = list(zip(self.sizes, self.weights, strict=True))
        self._shares = [max(round(size * weight), size > 0 < weight) for size, weight in pairs]
        self._starts = np.cumsum([0, *self.sizes])[:-1]
        self._cached: tuple[int, Order] | None = None
        if self.epoch_size == 0:
            raise DataError(
                f"no samples: the data sets hold {list(self.sizes)}, taken with weights {list(self.weights)}"
            )

    @property
    def epoch_size(self) -> int:
        """Samples per epoch."""
        return sum(self._shares)

    @property
    def epoch(self) -> int:
        """Number of whole epochs behind the position; at a boundary the next one has begun."""
        return self.position // self.epoch_size

    def advance(self, num_samples: int) -> None:
        """Count samples that have been trained on, by all ranks together."""
        self.position += num_samples

    def samples(self, start: int, stop: int) -> list[int]:
        """The samples at positions from `start` to `stop`, as indices into the data sets laid end to end."""
        found: list[int] = []
        while start < stop:
            epoch, offset = divmod(start, self.epoch_size)
            count = min(stop - start, self.epoch_size - offset)
            found += self._order(epoch)[offset : offset + count].tolist()
            start += count
        return found

    def micro_batches(self, shape: BatchShape, *, end: int) -> Iterator[list[int]]:
        """This rank's micro-batches from the position on, up to position `end`; the position itself does not move.

        A last batch that is not full is filled up with `NO_SAMPLE`, because all ranks have to take part in it.
        """
        per_pass = shape.micro_batch_size * shape.world_size
        for start in range(self.position, end, shape.batch_size):
            batch = self.samples(start, min(start + shape.batch_size, end))
            batch += [NO_SAMPLE] * (shape.batch_size - len(batch))
            for first in range(0, shape.batch_size, per_pass):
                mine = first + shape.rank * shape.micro_batch_size
                yield batch[mine : mine + shape.micro_batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it refers to."""
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shares": list(self._shares),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ConfigChanged: it belongs to another order of samples, so that some would come twice and others not at all; unless
                `accepts_other_orders`.
        """
        here = self.state_dict()
        changed = [name for name in here if name != "position" and state.get(name) != here[name]]
        if changed and not self.accepts_other_orders:
            found = ", ".join(f"{name}: {state.get(name)} -> {here[name]}" for name in changed)
            raise ConfigChanged(
                f"the saved data position belongs to another order of samples ({found})"
            )
        self.position = int(state["position"])

    def _order(self, epoch: int) -> Order:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._make_order(epoch))
        return self._cached[1]

    def _make_order(self, epoch: int) -> Order:
        parts = [self._share(number, epoch) for number in range(len(self.sizes))]
        every = np.concatenate(parts)
        return every[shuffled(len(every), self.seed, epoch)] if self.shuffle else every

    def _share(self, number: int, epoch: int) -> Order:
        """What one data set gives to an epoch: the next stretch of its own endless stream of passes."""
        share, size = self._shares[number], self.sizes[number]
        found: list[Order] = []
        at, stop = epoch * share, (epoch + 1) * share
        while at < stop:
            number_of_pass, offset = divmod(at, size)
            count = min(stop - at, size - offset)
            order = np.arange(size)
            if self.shuffle and share % size:
                order = shuffled(size, self.seed, number, number_of_pass)
            found.append(order[offset : offset + count] + self._starts[number])
            at += count
        return np.concatenate(found) if found else np.empty(0, np.int64)


def shuffled(size: int, *keys: int) -> Order:
    """A permutation that depends on the keys alone: not on the version of any library, as theirs would."""
    seed = 0
    for key in keys:
        seed = int(mix(np.array([seed ^ key % 2**64], np.uint64))[0])
    with np.errstate(over="ignore"):
        drawn = mix(np.arange(size, dtype=np.uint64) + np.uint64(seed))
    return np.argsort(drawn, kind="stable")


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014): 64 bits to 64 well-mixed bits, one to one."""
    with np.errstate(over="ignore"):
        values = values * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
