"""Field cases of theme G: optimizer and schedule. Each resume is into fresh objects."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import seed_all, train_state
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from backstay import Checkpointer, TrainState, restore
from backstay.errors import StateMismatch
from backstay.testing import run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.models import make_training, train_step

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "adam with decay": lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.5),
}


def pair(seed: int = 0) -> nn.ModuleList:
    """Two layers; what they compute is up to the test."""
    torch.manual_seed(seed)
    return nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])


def step(model: nn.ModuleList, optimizer: torch.optim.Optimizer, layers: tuple[int, ...]) -> None:
    """One update through some of the layers."""
    hidden = torch.linspace(-1, 1, 6).view(2, 3)
    for number in layers:
        hidden = torch.tanh(model[number](hidden))
    optimizer.zero_grad()
    hidden.sum().backward()
    optimizer.step()


def save_once(root: Path, state: TrainState) -> None:
    with Checkpointer(root, state) as checkpointer:
        checkpointer.save(1)


def test_every_field_of_every_group_comes_back(tmp_path: Path) -> None:
    """P31: learning rate is not restored."""
    model = pair()
    groups = [
        {"params": model[0].parameters(), "lr": 0.3, "weight_decay": 0.0, "betas": (0.8, 0.7)},
        {
            "params": model[1].parameters(),
            "lr": torch.tensor(0.25),
            "name": "second",
            "tries": None,
        },
    ]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    optimizer.param_groups[0]["lr"] = 0.1 + 0.2
    save_once(tmp_path, TrainState(model=model, optimizer=optimizer))
    other = pair(1)
    groups = [
        {"params": other[0].parameters()},
        {"params": other[1].parameters(), "lr": torch.tensor(9.0)},
    ]
    fresh = torch.optim.AdamW(groups, lr=5.0, weight_decay=9.0, foreach=False)
    restore(tmp_path, TrainState(model=other, optimizer=fresh))
    for before, after in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        without = [{k: v for k, v in group.items() if k != "params"} for group in (before, after)]
        assert without[0] == without[1]
    assert isinstance(fresh.param_groups[1]["lr"], Tensor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path, name: str) -> None:
    """P32: Adam's counter starts at 1: collecting state runs a dummy step."""
    ends = []
    for way in ("never saved", "saved", "resumed"):
        model = pair()
        optimizer = OPTIMIZERS[name](model.parameters())
        state = TrainState(model=model, optimizer=optimizer)
        if way == "saved":
            save_once(tmp_path, state)
            assert not optimizer.state
        elif way == "resumed":
            assert restore(tmp_path, state) == 1
            assert not optimizer.state
        step(model, optimizer, (0, 1))
        ends.append(state_bytes(model, optimizer))
    assert_bit_equal(ends[0], ends[1])
    assert_bit_equal(ends[0], ends[2])


def test_state_of_a_parameter_frozen_later_comes_back(tmp_path: Path) -> None:
    """P33: optimizer state of a parameter frozen later is dropped at load."""
    ends = []
    for is_interrupted in (False, True):
        model, optimizer = build()
        for _ in range(2):
            step(model, optimizer, (0, 1))
        model[0].requires_grad_(False)
        if is_interrupted:
            save_once(tmp_path, TrainState(model=model, optimizer=optimizer))
            model, optimizer = build(seed=5)
            model[0].requires_grad_(False)
            restore(tmp_path, TrainState(model=model, optimizer=optimizer))
        model[0].requires_grad_(True)
        for _ in range(2):
            step(model, optimizer, (0, 1))
        ends.append(state_bytes(model, optimizer))
    assert_bit_equal(*ends)


def build(seed: int = 0) -> tuple[nn.ModuleList, torch.optim.Optimizer]:
    model = pair(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_parameter_without_a_gradient_has_no_state_until_it_gets_one(tmp_path: Path) -> None:
    """P34: a parameter that never had a gradient breaks resume."""
    ends = []
    for is_interrupted in (False, True):
        model, optimizer = build()
        step(model, optimizer, (0,))
        if is_interrupted:
            save_once(tmp_path, TrainState(model=model, optimizer=optimizer))
            model, optimizer = build(seed=5)
            restore(tmp_path, TrainState(model=model, optimizer=optimizer))
            assert model[1].weight not in optimizer.state
        step(model, optimizer, (0, 1))
        ends.append(state_bytes(model, optimizer))
    assert_bit_equal(*ends)


def test_one_of_two_moments_missing_is_an_error(tmp_path: Path) -> None:
    """P34: entries wholly absent stay absent; entries partly absent are an error."""
    model, optimizer = build()
    step(model, optimizer, (0, 1))
    import torch.distributed.checkpoint as dcp

    state = {"model": model.state_dict(), "optimizer": {}}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if (names[id(parameter)], name) != ("0.weight", "exp_avg_sq"):
                state["optimizer"][f"state.{names[id(parameter)]}.{name}"] = value
        for name, value in optimizer.param_groups[0].items():
            if name != "params":
                state["optimizer"][f"param_groups.{names[id(parameter)]}.{name}"] = value
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path)
    other, fresh = build(seed=5)
    with pytest.raises(StateMismatch, match=r"optimizer\.state\.0\.weight\.exp_avg_sq"):
        restore(tmp_path, TrainState(model=other, optimizer=fresh), only=("model", "optimizer"))
    assert not fresh.state


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_optimizer_in_backward_resumes_on_any_number_of_ranks(
    tmp_path: Path, num_ranks: int
) -> None:
    """P35: resume with optimizer-in-backward only works on one device; here also switched off between runs."""
    before = run_ranks(2, train_in_backward, tmp_path)[0]
    for optimizer in ("in_backward", "adamw"):
        after = run_ranks(num_ranks, resume_in_backward, tmp_path, optimizer)[0]
        wanted = before if optimizer == "in_backward" else drop_groups(before)
        assert_bit_equal(wanted, after if optimizer == "in_backward" else drop_groups(after))


def train_in_backward(rank: int, world_size: int, root: Path) -> dict[str, str]:
    seed_all(0)
    training = make_training("fsdp2", optimizer="in_backward")
    for _ in range(3):
        train_step(training)
    save_once(root, train_state(training))
    return without_mean(state_bytes(training.model, training.optimizers))


def resume_in_backward(rank: int, world_size: int, root: Path, optimizer: str) -> dict[str, str]:
    training = make_training("fsdp2", optimizer=optimizer, seed=4)  # type: ignore[arg-type]
    state = train_state(training)
    restore(root, state, only=("model", "optimizer"), strict=optimizer == "in_backward")
    return without_mean(state_bytes(training.model, training.optimizers))


def without_mean(found: dict[str, str]) -> dict[str, str]:
    """The running mean is each rank's own."""
    found.pop("running_mean")
    return found


def drop_groups(found: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in found.items() if not name.startswith("param_groups")}


def test_the_learning_rate_follows_the_schedule_through_three_resumes(tmp_path: Path) -> None:
    """P36: scheduler restored without its optimizer, or counted twice."""
    whole = rates(tmp_path / "whole", stops=[])
    cut = rates(tmp_path / "cut", stops=[3, 7, 11])
    assert cut == whole
    assert len(whole) == 15


def rates(root: Path, stops: list[int], total: int = 15) -> list[float]:
    """The rate of each step of a run that is stopped and built anew after some of them."""
    found: list[float] = []
    for stop in [*stops, total]:
        model, optimizer = build()
        scheduler = LambdaLR(optimizer, warm_cosine)
        state = TrainState(model=model, optimizer=optimizer, lr_scheduler=scheduler)
        with Checkpointer(root, state) as checkpointer:
            for number in range(checkpointer.restore() + 1, stop + 1):
                found.append(optimizer.param_groups[0]["lr"])
                step(model, optimizer, (0, 1))
                scheduler.step()
                if number == stop:
                    checkpointer.save(number)
    return found


def warm_cosine(count: int) -> float:
    return min(1.0, (count + 1) / 4) * 0.5 * (1 + math.cos(math.pi * count / 15))


def test_a_scheduler_cannot_be_restored_without_its_optimizer_by_accident(tmp_path: Path) -> None:
    """P36: impossible combinations are refused."""
    model, optimizer = build()
    scheduler = LambdaLR(optimizer, warm_cosine)
    save_once(tmp_path, TrainState(model=model, optimizer=optimizer, lr_scheduler=scheduler))
    with pytest.raises(StateMismatch, match="optimizer"):
        restore(tmp_path, TrainState(model=model, lr_scheduler=scheduler))
    with pytest.raises(StateMismatch, match="lr_scheduler"):
        restore(tmp_path, TrainState(model=model, optimizer=optimizer))


def test_the_schedule_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    """P37: schedule runs N times too fast on N ranks."""
    one = run_ranks(1, rates_of, tmp_path / "1", 6)[0]
    two = (
        run_ranks(2, rates_of, tmp_path / "2", 3)[0] + run_ranks(1, rates_of, tmp_path / "2", 6)[0]
    )
    assert two == one
    assert len({*one}) > 1


def rates_of(rank: int, world_size: int, root: Path, total: int) -> list[float]:
    training = make_training("fsdp2")
    found = []
    with Checkpointer(root, train_state(training)) as checkpointer:
        for number in range(checkpointer.restore() + 1, total + 1):
            found.append(training.optimizer.param_groups[0]["lr"])
            train_step(training)
            if number == total:
                checkpointer.save(number)
    return found
