"""Tensor parallelism under FSDP2: parameters sharded over two mesh dimensions, which torch describes by strided shards."""

from pathlib import Path

import torch
from loops import seed_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from backstay import Checkpointer, TrainState, restore
from backstay.testing import run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes


def build(world_size: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two layers; with four ranks split over two for tensors and two for data, else over data alone."""
    seed_all(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["data"])
    elif world_size > 1:
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(rank: int, world_size: int, root: Path, total: int) -> dict[str, str]:
    model, optimizer = build(world_size, 0)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer)) as checkpointer:
        for step in range(checkpointer.restore() + 1, total + 1):
            model(torch.full((2, 6), float(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.maybe_save(step)
    return state_bytes(model, optimizer)


def load(rank: int, world_size: int, root: Path) -> dict[str, str]:
    model, optimizer = build(world_size, 7)
    restore(root, TrainState(model=model, optimizer=optimizer))
    return state_bytes(model, optimizer)


def test_a_tensor_parallel_run_resumes_exactly_and_moves_to_other_meshes(tmp_path: Path) -> None:
    whole = run_ranks(4, train, tmp_path / "whole", 4)
    run_ranks(4, train, tmp_path / "cut", 2)
    assert_bit_equal(run_ranks(4, train, tmp_path / "cut", 4)[0], whole[0])
    for num_ranks in (1, 2, 3, 4):
        assert_bit_equal(run_ranks(num_ranks, load, tmp_path / "whole")[0], whole[0])
