"""Tiny training loops learn, are deterministic, and have the oddities that they advertise."""

import pytest
import torch
from torch import nn

from backstay.errors import InvalidArgument
from backstay.testing import run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.models import (
    TinyModel,
    TinySampler,
    make_training,
    train_step,
    uneven_model,
)

PARALLEL = [
    (2, "ddp", "adamw"),
    (2, "ddp", "two"),
    (2, "fsdp2", "adamw"),
    (2, "fsdp2", "sgd"),
    (2, "fsdp2", "factored"),
    (2, "fsdp2", "two"),
    (2, "fsdp2", "in_backward"),
    (4, "hsdp", "adamw"),
    (4, "hsdp", "factored"),
]


def train(rank: int, world_size: int, kind: str, optimizer: str) -> tuple[list[float], dict]:
    training = make_training(kind, optimizer=optimizer)
    for _ in range(3):
        train_step(training)
    return training.losses, state_bytes(training.model, training.optimizers)


def train_uneven(rank: int, world_size: int) -> list[int]:
    training = make_training("fsdp2", model=uneven_model)
    train_step(training)
    return [p.to_local().shape[0] for p in training.model.parameters()]


def placements_of_factored_state(rank: int, world_size: int) -> dict[str, str]:
    training = make_training("fsdp2", optimizer="factored")
    train_step(training)
    state = training.optimizer.state[training.model.embedding.weight]
    return {key: str(value.placements) for key, value in state.items()}


@pytest.mark.parametrize(
    "optimizer", ["adamw", "sgd", "adafactor", "factored", "two", "in_backward"]
)
def test_a_single_process_learns_and_repeats_itself(optimizer: str) -> None:
    losses, state = train(0, 1, "single", optimizer)
    assert losses[-1] < losses[0]
    again, state_again = train(0, 1, "single", optimizer)
    assert again == losses
    assert_bit_equal(state, state_again)


@pytest.mark.parametrize(("num_ranks", "kind", "optimizer"), PARALLEL)
def test_ranks_hold_one_model_and_repeat_themselves(
    num_ranks: int, kind: str, optimizer: str
) -> None:
    first = run_ranks(num_ranks, train, kind, optimizer)
    second = run_ranks(num_ranks, train, kind, optimizer)
    assert first == second
    for _, state in first[1:]:
        state["running_mean"] = first[0][1]["running_mean"]  # a rank's own
        assert_bit_equal(state, first[0][1])


def test_some_shards_of_the_uneven_model_are_empty() -> None:
    rows = run_ranks(3, train_uneven)
    assert [sum(column) for column in zip(*rows, strict=True)] == [2, 2, 5, 5, 7, 7, 1, 1]
    assert 0 in rows[2]


def test_the_model_has_its_oddities() -> None:
    training = make_training()
    model = training.model
    assert isinstance(model, TinyModel)
    buffer = model.running_mean
    train_step(training)
    assert model.running_mean is not buffer
    assert model.head.weight is model.embedding.weight
    assert model.never_used not in training.optimizer.state
    assert not model.block.frozen_scale.requires_grad


def test_a_sampler_resumes_where_it_was() -> None:
    sampler = TinySampler(num_samples=5, seed=3)
    sampler.take(7)
    saved = sampler.state_dict()
    assert saved == sampler.state_dict()
    expected = sampler.take(6)
    other = TinySampler()
    other.load_state_dict(saved)
    assert other.take(6) == expected


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    sampler = TinySampler(num_samples=8)
    first, second = sampler.take(8), sampler.take(8)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second


def test_differences_are_named() -> None:
    left, right = nn.Linear(2, 2), nn.Linear(2, 2)
    right.load_state_dict(left.state_dict())
    assert_bit_equal(state_bytes(left), state_bytes(right))
    with torch.no_grad():
        right.bias[0] += 1
    right.register_buffer("extra", torch.zeros(()))
    with pytest.raises(
        AssertionError, match=r"(?s)2 of 3 values.*bias: float32 \[2\] .*extra: only"
    ):
        assert_bit_equal(state_bytes(left), state_bytes(right))


def test_state_bytes_sees_every_kind_of_tensor() -> None:
    model = nn.Module()
    tensors = [
        torch.tensor(True),
        torch.empty(0),
        torch.ones(2, 3).T,
        torch.ones(2, dtype=torch.complex64),
    ]
    for index, tensor in enumerate([*tensors, torch.ones(3).to(torch.float8_e4m3fn)]):
        model.register_buffer(f"b{index}", tensor)
    assert len(state_bytes(model)) == 5


def test_combinations_that_torch_cannot_do_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="in_backward"):
        make_training("ddp", optimizer="in_backward")
    with pytest.raises(InvalidArgument, match="factored"):
        make_training("fsdp2", optimizer="adafactor")


def test_factored_state_is_placed_otherwise_than_its_parameter() -> None:
    assert run_ranks(2, placements_of_factored_state)[0] == {
        "row": "(Shard(dim=0),)",
        "column": "(Replicate(),)",
    }
