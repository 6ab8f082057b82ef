"""Field cases of theme H, as far as the engine goes: data position and random number generators."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import seed_all, train_state
from torch import nn

from backstay import Checkpointer, PerRank, TrainState, restore
from backstay.errors import StateMismatch
from backstay.testing import run_ranks
from backstay.testing.models import TinySampler, make_training, train_step


def test_saving_does_not_change_which_samples_come_next(tmp_path: Path) -> None:
    """P40: asking the sampler for its state changes it - on rank 0 only."""
    quiet = run_ranks(2, positions, tmp_path / "quiet", 0)
    saving = run_ranks(2, positions, tmp_path / "saving", 1)
    assert quiet == saving
    assert quiet[0] == quiet[1]


def positions(rank: int, world_size: int, root: Path, every: int) -> list[Any]:
    training = make_training("fsdp2")
    found = []
    with Checkpointer(root, train_state(training)) as checkpointer:
        for step in range(1, 8):
            train_step(training)
            found.append((training.sampler.position, training.sampler.take(0)))
            if every:
                checkpointer.save(step)
    return found


def test_each_rank_gets_its_own_generators_back(tmp_path: Path) -> None:
    """P41: all ranks come back with somebody else's RNG."""
    expected = run_ranks(2, draw_and_save, tmp_path)
    assert run_ranks(2, load_and_draw, tmp_path) == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_other_numbers_of_ranks_get_streams_of_their_own(tmp_path: Path, num_ranks: int) -> None:
    """P41: on another world size there is a stated rule: derived from the saved ones, distinct, the same each time."""
    run_ranks(2, draw_and_save, tmp_path)
    found = run_ranks(num_ranks, load_and_draw, tmp_path)
    assert found == run_ranks(num_ranks, load_and_draw, tmp_path)
    assert len({repr(draws) for draws in found}) == num_ranks


def draws() -> list[float]:
    """Five of each generator."""
    mine = [random.gauss(0, 1) for _ in range(5)]
    return [*mine, *np.random.normal(size=5).tolist(), *torch.rand(5).tolist()]


def draw_and_save(rank: int, world_size: int, root: Path) -> list[float]:
    seed_all(rank)
    for _ in range(3 * (rank + 1)):
        random.gauss(0, 1), np.random.normal(), torch.rand(1)
    with Checkpointer(root, TrainState(model=nn.Identity())) as checkpointer:
        checkpointer.save(1)
        return draws()


def load_and_draw(rank: int, world_size: int, root: Path) -> list[float]:
    restore(root, TrainState(model=nn.Identity()))
    return draws()


class Statistic(nn.Module):
    """A plain buffer and a parameter; what they hold is up to each rank."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(value)))
        self.register_buffer("count", torch.full((3,), float(value)))


@pytest.mark.parametrize("declared", [True, False])
def test_tensors_that_differ_between_ranks_are_never_merged(tmp_path: Path, declared: bool) -> None:
    """P42: per-rank tensors under one key are silently merged."""
    run_ranks(2, save_own, tmp_path, declared)
    assert run_ranks(2, load_own, tmp_path, declared) == [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]


def save_own(rank: int, world_size: int, root: Path, declared: bool) -> None:
    values = {"tensor": torch.tensor(rank + 1.0), "text": "x" * rank, "number": rank + 1.0}
    extra = {"own": PerRank(values) if declared else values}
    with Checkpointer(root, TrainState(model=Statistic(rank + 1), extra=extra)) as checkpointer:
        checkpointer.save(1)


def load_own(rank: int, world_size: int, root: Path, declared: bool) -> list[float]:
    values: dict[str, Any] = {"tensor": torch.tensor(0.0), "text": "", "number": 0.0}
    extra = {"own": PerRank(values) if declared else values}
    state = TrainState(model=Statistic(0), extra=extra)
    restore(root, state)
    own = state.extra["own"].value if declared else state.extra["own"]
    assert own["tensor"].item() == own["number"] == rank + 1
    assert own["text"] == "x" * rank
    return [state.model.weight[0].item(), state.model.count[0].item(), own["number"]]


def test_what_each_rank_had_for_itself_is_refused_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """P42, P43: never rank 0's value on rank 1, and nothing dropped in silence."""
    run_ranks(2, save_own, tmp_path, False)
    for num_ranks in (1, 3):
        run_ranks(num_ranks, refuse_own, tmp_path)


def refuse_own(rank: int, world_size: int, root: Path) -> None:
    state = TrainState(model=Statistic(0), extra={"own": {}})
    with pytest.raises(StateMismatch, match=r"(?s)model\.weight.*extra\.own: each of 2 ranks"):
        restore(root, state)
    assert state.model.weight[0].item() == 0


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_a_global_position_moves_to_any_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    """P43: shrinking the data-parallel size drops the other ranks' data positions."""
    seen = [
        run_ranks(ranks, take_ids, tmp_path, total)[0]
        for ranks, total in ((before, 5), (after, 10))
    ]
    ids = [each for part in seen for each in part]
    assert sorted(ids) == sorted([*range(40)] * 3)


def take_ids(rank: int, world_size: int, root: Path, total: int) -> list[int]:
    """Ids of all ranks together: the sampler gives each step's to all of them."""
    sampler = TinySampler()
    found: list[int] = []
    with Checkpointer(root, TrainState(model=nn.Identity(), sampler=sampler)) as checkpointer:
        for step in range(checkpointer.restore() + 1, total + 1):
            found += sampler.take(12)
            checkpointer.save(step)
    return found


class LocalPosition:
    """A sampler of the bad kind: each rank counts for itself."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_positions_that_ranks_counted_for_themselves_come_back_or_are_refused(
    tmp_path: Path,
) -> None:
    """P43: in both directions."""
    run_ranks(4, save_position, tmp_path)
    assert run_ranks(4, load_position, tmp_path) == [0, 10, 20, 30]
    for num_ranks in (2, 5):
        run_ranks(num_ranks, refuse_position, tmp_path)


def save_position(rank: int, world_size: int, root: Path) -> None:
    state = TrainState(model=nn.Identity(), sampler=LocalPosition(10 * rank))
    with Checkpointer(root, state) as checkpointer:
        checkpointer.save(1)


def load_position(rank: int, world_size: int, root: Path) -> int:
    sampler = LocalPosition(-1)
    restore(root, TrainState(model=nn.Identity(), sampler=sampler))
    return sampler.position


def refuse_position(rank: int, world_size: int, root: Path) -> None:
    sampler = LocalPosition(-1)
    with pytest.raises(StateMismatch, match="sampler: each of 4 ranks saved its own"):
        restore(root, TrainState(model=nn.Identity(), sampler=sampler))
    assert sampler.position == -1
