"""Tensor subclasses, as quantisation makes them: stored whole, restored as what they were, through the restricted unpickler."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from backstay import Checkpointer, TrainState, restore
from backstay.errors import StateMismatch
from backstay.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*SWIG.*"),
]

# In a fresh process that never trained: what loading needs must not depend on a step.
QUANTISED = """
import sys, torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from backstay import Checkpointer, TrainState, restore
def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    model[0].weight.requires_grad_(False)
    return model
root, mode = sys.argv[1:]
if mode == "save":
    with Checkpointer(root, TrainState(model=build(0))) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
else:
    model, expected, inputs = build(5), build(0), torch.ones(1, 64)
    assert not torch.equal(model(inputs), expected(inputs))
    restore(root, TrainState(model=model))
    assert torch.equal(model(inputs), expected(inputs))
    assert type(model[0].weight) is type(expected[0].weight)
"""


def test_quantised_weights_are_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    """P67: tensor subclasses cannot be loaded in a fresh process."""
    for mode in ("save", "load"):
        subprocess.run(
            [sys.executable, "-c", QUANTISED, str(tmp_path), mode], check=True, timeout=100
        )
    paths = [tmp_path / f"step-0000000{step}" / "weights" / "__0_1.distcp" for step in (1, 2)]
    assert paths[0].samefile(paths[1])


def test_quantised_optimizer_state_resumes_exactly_on_as_many_ranks(tmp_path: Path) -> None:
    """P65: optimizer with quantised state breaks at save or at resume."""
    whole = run_ranks(2, train, tmp_path / "whole", 4, timeout_s=100)
    run_ranks(2, train, tmp_path / "cut", 2, timeout_s=100)
    assert run_ranks(2, train, tmp_path / "cut", 4, timeout_s=100) == whole
    run_ranks(1, refuse, tmp_path / "cut", timeout_s=100)


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torchao.optim import AdamW8bit

    torch.manual_seed(seed)
    # Sharded tensors of at least 4096 elements have their moments quantised.
    model = fully_shard(nn.Linear(256, 64, bias=False))
    return model, AdamW8bit(model.parameters(), lr=0.01)  # type: ignore[no-any-return]


def train(rank: int, world_size: int, root: Path, total: int) -> tuple[Any, ...]:
    model, optimizer = build(0)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer)) as checkpointer:
        for step in range(checkpointer.restore() + 1, total + 1):
            torch.manual_seed(10 * step + rank)
            model(torch.randn(4, 256)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (2, total):
                checkpointer.save(step)
    moment = optimizer.state[model.weight]["exp_avg"].to_local()
    assert type(moment).__name__ == "OptimState8bit"
    codes = [getattr(moment, name) for name in moment.__tensor_flatten__()[0]]
    return tuple(tensor.tolist() for tensor in [*codes, model.weight.to_local().detach()])


def refuse(rank: int, world_size: int, root: Path) -> None:
    model, optimizer = build(1)
    with pytest.raises(StateMismatch, match="special class, stored in other parts"):
        restore(root, TrainState(model=model, optimizer=optimizer))
    assert not optimizer.state
