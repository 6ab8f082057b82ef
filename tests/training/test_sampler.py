"""The order of samples, and the one integer that says where in it a run is."""

from collections import Counter

import numpy as np
import pytest

from backstay.errors import ConfigChanged, DataError
from backstay.training.sampler import NO_SAMPLE, BatchShape, ResumableSampler, shuffled


def all_ranks(sampler: ResumableSampler, batch: int, micro: int, world: int, end: int) -> list[int]:
    """The samples of each batch over all ranks, as they are taken."""
    shapes = [BatchShape(batch, micro, rank, world) for rank in range(world)]
    plans = [list(sampler.micro_batches(shape, end=end)) for shape in shapes]
    assert len({len(plan) for plan in plans}) == 1, "every rank takes part in every pass"
    per_step = shapes[0].num_micro_batches
    steps = range(0, len(plans[0]), per_step)
    return [
        sorted(s for plan in plans for micro in plan[at : at + per_step] for s in micro)
        for at in steps
    ]


@pytest.mark.parametrize(("micro", "world"), [(1, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
def test_batches_do_not_depend_on_ranks_and_micro_batches(micro: int, world: int) -> None:
    sampler = ResumableSampler([23], seed=5)
    assert all_ranks(sampler, 4, micro, world, 69) == all_ranks(sampler, 4, 1, 1, 69)


def test_every_sample_comes_once_per_epoch() -> None:
    sampler = ResumableSampler([10, 7], seed=1)
    for epoch in range(3):
        assert sorted(sampler.samples(17 * epoch, 17 * epoch + 17)) == list(range(17))
    assert sampler.samples(0, 17) != sampler.samples(17, 34)


def test_the_last_batch_is_filled_up_and_no_sample_is_lost() -> None:
    sampler = ResumableSampler([10], seed=1)
    batches = all_ranks(sampler, 4, 1, 2, 10)
    assert [batch.count(NO_SAMPLE) for batch in batches] == [0, 0, 2]
    assert sorted(s for batch in batches for s in batch if s != NO_SAMPLE) == list(range(10))


def test_a_fraction_walks_on_so_that_all_samples_come_equally_often() -> None:
    sampler = ResumableSampler([4, 10], weights=[1, 0.5], seed=2)
    assert sampler.epoch_size == 9
    counts = Counter(sampler.samples(0, 9 * 4))
    assert {counts[sample] for sample in range(4)} == {4}
    assert {counts[sample] for sample in range(4, 14)} == {2}


def test_a_whole_weight_repeats_a_data_set_within_the_epoch() -> None:
    counts = Counter(ResumableSampler([3, 5], weights=[3, 1], seed=2).samples(0, 14))
    assert [counts[sample] for sample in range(8)] == [3, 3, 3, 1, 1, 1, 1, 1]


def test_reading_ahead_and_asking_for_the_state_move_nothing() -> None:
    """P40: asking the sampler for its state changes it."""
    sampler = ResumableSampler([20], seed=3)
    plan = sampler.micro_batches(BatchShape(4, 1, 0, 2), end=40)
    ahead = [next(plan) for _ in range(7)]
    for _ in range(3):
        assert sampler.state_dict()["position"] == 0
    assert [next(sampler.micro_batches(BatchShape(4, 1, 0, 2), end=40))] == ahead[:1]


def test_a_position_is_restored_in_any_epoch() -> None:
    first = ResumableSampler([20], seed=3)
    first.advance(52)
    second = ResumableSampler([20], seed=3)
    second.load_state_dict(first.state_dict())
    assert (second.position, second.epoch) == (52, 2)


@pytest.mark.parametrize(
    "other",
    [{"seed": 4}, {"weights": [2.0]}, {"shuffle": False}],
    ids=lambda other: next(iter(other)),
)
def test_a_position_in_another_order_is_refused(other: dict[str, object]) -> None:
    state = ResumableSampler([20], seed=3).state_dict()
    with pytest.raises(ConfigChanged, match="another order of samples"):
        ResumableSampler([20], **{"seed": 3, **other}).load_state_dict(state)
    with pytest.raises(ConfigChanged, match="shares"):
        ResumableSampler([21], seed=3).load_state_dict(state)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_restored_run_takes_what_the_first_one_left_on_any_number_of_ranks(world: int) -> None:
    whole = all_ranks(ResumableSampler([23], seed=5), 4, 1, 2, 69)
    rest = ResumableSampler([23], seed=5)
    rest.load_state_dict({**rest.state_dict(), "position": 4 * 7})
    assert all_ranks(rest, 4, 1, world, 69) == whole[7:]


def test_a_batch_reaches_over_the_border_of_an_epoch() -> None:
    sampler = ResumableSampler([10], seed=1)
    batches = all_ranks(sampler, 4, 2, 1, 20)
    assert batches[2] == sorted(sampler.samples(8, 12))
    assert NO_SAMPLE not in batches[2]
    counts = Counter(sample for batch in batches for sample in batch)
    assert set(counts.values()) == {2}


def test_without_shuffling_samples_come_as_they_lie_in_the_files() -> None:
    sampler = ResumableSampler([3, 2], shuffle=False)
    assert sampler.samples(0, 8) == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_position_in_another_order_is_taken_over_where_that_is_asked_for() -> None:
    other = ResumableSampler([21], seed=4)
    other.accepts_other_orders = True
    other.load_state_dict({**ResumableSampler([20], seed=3).state_dict(), "position": 8})
    assert other.position == 8
    assert other.state_dict()["seed"] == 4


def test_nothing_to_sample_is_an_error() -> None:
    with pytest.raises(DataError, match="no samples"):
        ResumableSampler([0])


def test_the_order_never_changes_from_one_version_to_the_next() -> None:
    """A resumed run relies on it; if this fails, positions in existing checkpoints have lost their meaning."""
    assert shuffled(12, 0, 0).tolist() == PINNED_0
    assert shuffled(12, 7, 3).tolist() == PINNED_7
    mixed = ResumableSampler([5, 4], weights=[1, 0.5], seed=11)
    assert mixed.samples(0, 21) == PINNED_MIX


def test_shuffling_is_fair() -> None:
    places = np.zeros((8, 8))
    for seed in range(4000):
        places[np.arange(8), shuffled(8, seed, 0)] += 1
    # Each of 64 counts is 500 on average, with a standard deviation of 21.
    assert abs(places - 500).max() < 100


PINNED_0 = [10, 7, 3, 2, 4, 6, 0, 5, 1, 8, 11, 9]
PINNED_7 = [4, 10, 2, 6, 5, 0, 3, 1, 7, 9, 11, 8]
PINNED_MIX = [3, 4, 1, 7, 2, 0, 8, 5, 3, 4, 2, 0, 6, 1, 7, 5, 0, 4, 3, 1, 2]
