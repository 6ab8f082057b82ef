"""Best-fit-decreasing: each sample once, no sequence too long, few sequences."""

import random
import time

from backstay.training.packing import pack


def test_every_sample_is_in_one_sequence_that_holds_it() -> None:
    draw = random.Random(0)
    for _ in range(200):
        capacity = draw.randint(1, 60)
        lengths = [draw.randint(1, capacity) for _ in range(draw.randint(0, 40))]
        packs = pack(lengths, capacity)
        assert sorted(index for each in packs for index in each) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in each) <= capacity for each in packs)
        assert packs == pack(lengths, capacity)


def pack_slowly(lengths: list[int], capacity: int) -> int:
    """Number of sequences by best fit, longest first, as the textbook has it."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - length)
    return len(rooms)


def test_as_many_sequences_as_the_textbook_needs() -> None:
    draw = random.Random(2)
    for _ in range(100):
        capacity = draw.randint(1, 60)
        lengths = [draw.randint(1, capacity) for _ in range(draw.randint(0, 60))]
        assert len(pack(lengths, capacity)) == pack_slowly(lengths, capacity)


def test_the_sequences_never_change_from_one_version_to_the_next() -> None:
    """Data positions in checkpoints count sequences, so they must hold the same samples for ever."""
    assert pack([3, 4, 1, 4, 2], 5) == [[0, 4], [1], [2, 3]]
    lengths = [1 + index * 7 % 11 for index in range(12)]
    assert pack(lengths, 12) == PINNED
    assert pack([], 5) == []


def test_few_sequences_are_used() -> None:
    draw = random.Random(1)
    lengths = [draw.randint(20, 700) for _ in range(5000)]
    assert len(pack(lengths, 1024)) < 1.02 * sum(lengths) / 1024


def test_many_samples_take_little_time() -> None:
    lengths = [1 + index * 7919 % 4096 for index in range(100_000)]
    began = time.perf_counter()
    pack(lengths, 4096)
    assert time.perf_counter() - began < 2


PINNED = [[0, 3], [1, 2], [4, 10], [5, 9], [6, 8], [7, 11]]
