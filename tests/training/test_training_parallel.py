"""Ways to spread a model over ranks: each computes what one rank alone computes."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from backstay.errors import ConfigError, ModelError
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.ranks import run_ranks
from backstay.testing.tiny_llm import write_tiny_llm
from backstay.training.losses import compute_logits
from backstay.training.model import ModelConfig, build_model, load_weights, materialize, open_model
from backstay.training.optim import OptimizerConfig, clip_gradients, make_optimizer
from backstay.training.parallel import (
    ParallelConfig,
    check_world,
    find_layers,
    make_mesh,
    spread,
)

CPU = torch.device("cpu")
NUM_ROWS, NUM_STEPS = 4, 3
Course = tuple[list[float], list[float]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


def load(path: Path, parallel: ParallelConfig, world_size: int) -> nn.Module:
    config = ModelConfig(path=str(path))
    files = open_model(config)
    model = build_model(files, config)
    spread(model, parallel, make_mesh(parallel, CPU, world_size))
    materialize(model, CPU)
    load_weights(model, files, seed=0)
    return model.train()


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """Of this rank's rows of a batch that does not depend on the number of ranks."""
    ids = torch.randint(3, 200, (NUM_ROWS, 16), generator=torch.Generator().manual_seed(step))
    mine = ids[rank::world_size]
    positions = torch.arange(16).expand_as(mine)
    logits = compute_logits(model, mine, positions)[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())


def train(
    rank: int, world_size: int, path: Path, parallel: ParallelConfig
) -> tuple[Course, dict[str, str]]:
    """Losses and gradient norms of a few updates, and the weights at the end."""
    model = load(path, parallel, world_size)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.01))
    losses, norms = [], []
    for step in range(NUM_STEPS):
        loss = loss_of(model, step, rank, world_size)
        loss.backward()
        norms.append(clip_gradients(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return (losses, norms), state_bytes(model)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> tuple[Course, dict[str, str]]:
    """What one rank computes."""
    found: tuple[Course, dict[str, str]] = run_ranks(1, train, tiny, ParallelConfig())[0]
    return found


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    [
        (2, ParallelConfig()),
        (4, ParallelConfig(replicas=2)),
    ],
    ids=["two shards", "two by two"],
)
def test_losses_and_gradients_are_those_of_one_rank(
    world_size: int, parallel: ParallelConfig, tiny: Path, alone: Any
) -> None:
    found = run_ranks(world_size, train, tiny, parallel)
    (losses, norms), weights = found[0]
    assert losses == pytest.approx(alone[0][0], rel=1e-5)
    assert norms == pytest.approx(alone[0][1], rel=1e-4)
    for _, other in found[1:]:
        assert_bit_equal(weights, other)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(activation_checkpointing=True),
        ParallelConfig(reshard_after_forward=False),
    ],
    ids=["recomputed", "kept"],
)
def test_what_only_saves_memory_or_time_changes_no_bit(
    parallel: ParallelConfig, tiny: Path
) -> None:
    expected, found = (run_ranks(2, train, tiny, each)[0] for each in (ParallelConfig(), parallel))
    assert found[0] == expected[0]
    assert_bit_equal(expected[1], found[1])


def recompute_alone(rank: int, world_size: int, path: Path) -> tuple[int, int]:
    """How often layers run forward, without and with activation checkpointing."""
    counts = []
    for is_recomputed in (False, True):
        parallel = ParallelConfig(activation_checkpointing=is_recomputed)
        model = load(path, parallel, world_size)
        calls: list[int] = []
        for layer in find_layers(model):
            layer.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        loss_of(model, 0, rank, world_size).backward()
        counts.append(len(calls))
    return counts[0], counts[1]


def test_activations_are_really_computed_again(tiny: Path) -> None:
    assert run_ranks(1, recompute_alone, tiny) == [(2, 4)]


def dtypes(rank: int, world_size: int, path: Path) -> tuple[set[str], set[str], str]:
    model = load(path, ParallelConfig(precision="bfloat16"), world_size)
    layer: Any = model.get_submodule("model.layers.0")
    inside: list[torch.Tensor] = []
    layer.register_forward_hook(lambda _, __, output: inside.append(output))
    loss_of(model, 0, rank, world_size).backward()
    parameters = [*model.parameters()]
    gradients = {
        str(parameter.grad.dtype) for parameter in parameters if parameter.grad is not None
    }
    return {str(parameter.dtype) for parameter in parameters}, gradients, str(inside[0].dtype)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_is_for_forward_and_backward_only(world_size: int, tiny: Path) -> None:
    expected = ({"torch.float32"}, {"torch.float32"}, "torch.bfloat16")
    assert run_ranks(world_size, dtypes, tiny) == [expected] * world_size


def is_sharded(_: int, world_size: int, path: Path) -> bool:
    model = load(path, ParallelConfig(), world_size)
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_one_rank_alone_is_left_as_it_is(tiny: Path) -> None:
    assert run_ranks(1, is_sharded, tiny) == [False]
    assert run_ranks(2, is_sharded, tiny) == [True, True]


@torch.no_grad()
def compile_alone(rank: int, world_size: int, path: Path) -> tuple[float, float, int]:
    """The loss of a model without and with compilation, and how many graphs were compiled."""
    losses = []
    for is_compiled in (False, True):
        model = load(path, ParallelConfig(compile=is_compiled), world_size)
        losses.append(loss_of(model, 0, rank, world_size).item())
    return losses[0], losses[1], counters["stats"]["unique_graphs"]


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="torch.compile needs a C++ compiler",
)
def test_compiled_layers_compute_the_same(tmp_path: Path) -> None:
    write_tiny_llm(tmp_path, num_hidden_layers=1)
    plain, compiled, num_graphs = run_ranks(1, compile_alone, tmp_path, timeout_s=100)[0]
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert num_graphs == 1


def test_ranks_have_to_fit_the_replicas() -> None:
    check_world(ParallelConfig(replicas=2), 6)
    with pytest.raises(ConfigError, match="replicas=4 does not divide the 6 ranks"):
        check_world(ParallelConfig(replicas=4), 6)


def test_a_model_without_named_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear does not name its repeated layers"):
        find_layers(nn.Linear(1, 1))
