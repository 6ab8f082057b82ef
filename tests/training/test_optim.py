"""The learning rate as a function of the step, and which parameters decay."""

import math

import pytest
import torch
from torch import nn

from backstay.errors import ConfigError
from backstay.training.optim import (
    OptimizerConfig,
    clip_gradients,
    make_optimizer,
    rate_at,
    set_rate,
)


def rates(num_steps: int, **changes: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, **changes)  # type: ignore[arg-type]
    return [rate_at(step, num_steps, config) for step in range(1, num_steps + 1)]


def test_the_rate_warms_up_and_falls_to_its_end() -> None:
    found = rates(10, warmup_steps=4, final_ratio=0.1)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[6] == pytest.approx(0.55)
    assert found[-1] == pytest.approx(0.1)
    assert found[3:] == sorted(found[3:], reverse=True)


def test_a_step_beyond_the_end_keeps_the_rate_of_the_end() -> None:
    config = OptimizerConfig(lr=1.0, final_ratio=0.1)
    assert rate_at(15, 10, config) == rate_at(10, 10, config) == pytest.approx(0.1)


def test_setting_a_rate_reaches_all_parameters() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), OptimizerConfig(weight_decay=0.1))
    set_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_other_shapes() -> None:
    assert rates(4, schedule="constant") == [1, 1, 1, 1]
    assert rates(4, schedule="linear", final_ratio=0) == [0.75, 0.5, 0.25, 0]
    assert rates(2, warmup_steps=5) == [0.2, 0.4]


def test_vectors_do_not_decay_and_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    groups = make_optimizer(model, OptimizerConfig(weight_decay=0.1)).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [[tuple(p.shape) for p in group["params"]] for group in groups] == [
        [(3, 2)],
        [(3,), (3,), (3,)],
    ]


@pytest.mark.parametrize(("limit", "left"), [(0.0, 5.0), (1.0, 1.0), (9.0, 5.0)])
def test_gradients_are_clipped_and_measured(limit: float, left: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_gradients(model, limit).item() == 5.0
    assert model.weight.grad.norm().item() == pytest.approx(left, rel=1e-5)


IMPOSSIBLE: list[tuple[str, object]] = [
    ("lr", 0),
    ("lr", math.inf),
    ("betas", (0.9, 1.0)),
    ("eps", -1),
    ("weight_decay", -0.1),
    ("warmup_steps", -1),
    ("clip_norm", math.nan),
    ("final_ratio", 2),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_impossible_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{name}="):
        OptimizerConfig(**{name: value})  # type: ignore[arg-type]
