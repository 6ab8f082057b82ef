"""Field cases of themes I and P: model state, and what a foreign checkpoint may do."""

import itertools
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from loops import train_state
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from backstay import Checkpointer, TrainState, restore
from backstay.errors import BaseMismatch, CorruptCheckpoint, StateMismatch
from backstay.testing import run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.models import make_training, train_step


def save_once(root: Path, state: TrainState, **options: Any) -> None:
    with Checkpointer(root, state, **options) as checkpointer:
        checkpointer.save(1)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_another_dtype_is_an_error_or_an_announced_conversion(
    tmp_path: Path, stored: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """P46: load casts to the template's dtype without a word. Weights, moments and buffers alike."""
    here = torch.bfloat16 if stored == torch.float32 else torch.float32
    training = make_training()
    training.model.to(stored)
    train_step(training)
    save_once(tmp_path, train_state(training))
    other = make_training(seed=3)
    other.model.to(here)
    train_step(other)
    before = state_bytes(other.model, other.optimizers)
    with pytest.raises(StateMismatch, match=r"(?s)model\.running_mean.*bfloat16"):
        restore(tmp_path, train_state(other))
    assert_bit_equal(before, state_bytes(other.model, other.optimizers))
    with caplog.at_level(logging.WARNING, "backstay"):
        restore(tmp_path, train_state(other), convert_dtype=True)
    assert "converted from" in caplog.text
    for name, value in training.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[name], value.to(here))
    # Moments keep the dtype they were saved in: nothing asked for another.
    moment = other.optimizer.state[other.model.embedding.weight]["exp_avg"]
    assert moment.dtype == stored


WRAPPERS = ["compile", "checkpoint", "shard"]


def wrapped(order: tuple[str, ...], seed: int = 0) -> nn.Module:
    """A small model whose layers are wrapped in an order."""
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for name in order:
        for index in range(2):
            if name == "compile":
                model[index] = torch.compile(model[index])
            elif name == "checkpoint":
                model[index] = checkpoint_wrapper(model[index])
            else:
                fully_shard(model[index])
    return model  # type: ignore[no-any-return]


def test_names_are_the_same_under_any_nesting_of_wrappers(tmp_path: Path) -> None:
    """P47: compiled layers inside checkpoint wrappers get other names."""
    orders = [order for size in range(4) for order in itertools.permutations(WRAPPERS, size)]
    assert len(orders) == 16
    run_ranks(1, save_and_load_wrapped, tmp_path, orders)


def save_and_load_wrapped(rank: int, world_size: int, root: Path, orders: list[Any]) -> None:
    for number, order in enumerate(orders):
        save_once(root / str(number), TrainState(model=wrapped(order)))
    expected = state_bytes(wrapped(()))
    for number in range(len(orders)):
        model = wrapped(orders[-1 - number], seed=9)
        restore(root / str(number), TrainState(model=model))
        assert_bit_equal(expected, state_bytes(model))


def test_tied_weights_stay_one_parameter_with_one_state(tmp_path: Path) -> None:
    """P48: tied embeddings: host memory blow-up, or silently untied."""
    whole = run_ranks(2, train_tied, tmp_path / "whole", 4)[0]
    run_ranks(2, train_tied, tmp_path / "cut", 2)
    assert_bit_equal(whole, run_ranks(2, train_tied, tmp_path / "cut", 4)[0])


def train_tied(rank: int, world_size: int, root: Path, total: int) -> dict[str, str]:
    training = make_training("fsdp2", seed=0)
    with Checkpointer(root, train_state(training)) as checkpointer:
        for _ in range(checkpointer.restore(), total):
            assert training.model.head.weight is training.model.embedding.weight
            train_step(training)
        checkpointer.save(total)
    metadata = dcp.FileSystemReader(root / f"step-{total:08d}" / "weights").read_metadata()
    places = {
        index.fqn: (info.relative_path, info.offset)
        for index, info in metadata.storage_data.items()
        if index.fqn in ("model.head.weight", "model.embedding.weight") and index.offset[0] == 0
    }
    assert places["model.head.weight"] == places["model.embedding.weight"]
    assert "optimizer.state.head.weight.exp_avg" not in metadata.state_dict_metadata
    found = state_bytes(training.model, training.optimizers)
    found.pop("running_mean")
    return found


def test_tied_parameters_on_the_meta_device_are_loaded_once(tmp_path: Path) -> None:
    """P48: still one parameter after meta init, materialising and loading."""
    training = make_training()
    train_step(training)
    save_once(tmp_path, train_state(training))
    with torch.device("meta"):
        model = type(training.model)()
    model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight
    restore(tmp_path, TrainState(model=model), only=("model",))
    assert model.head.weight is model.embedding.weight
    assert_bit_equal(state_bytes(training.model), state_bytes(model))


def test_two_stored_values_for_tied_parameters_are_refused(tmp_path: Path) -> None:
    """P48: a checkpoint made untied cannot be loaded tied without losing one of the two."""
    state = make_training().model.state_dict()
    untied = state | {"head.weight": state["head.weight"] + 1}
    for name, values in (("untied", untied), ("tied", state)):
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"model": values}, checkpoint_id=tmp_path / name)
    other = make_training(seed=3)
    before = state_bytes(other.model)
    with pytest.raises(StateMismatch, match=r"head\.weight.*two different values"):
        restore(tmp_path / "untied", TrainState(model=other.model), only=("model",))
    assert_bit_equal(before, state_bytes(other.model))
    restore(tmp_path / "tied", TrainState(model=other.model), only=("model",))
    assert torch.equal(other.model.head.weight, state["head.weight"])


def adapter(seed: int = 0, base_seed: int = 0) -> nn.Sequential:
    """A frozen base with one trainable layer on top."""
    torch.manual_seed(base_seed)
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    torch.manual_seed(seed)
    return nn.Sequential(base, nn.Linear(8, 8, bias=False))


def test_frozen_parameters_left_out_are_not_missed_but_trainable_ones_are(tmp_path: Path) -> None:
    """P49: ignoring frozen parameters at save makes strict load fail."""
    run_ranks(2, save_adapter, tmp_path)
    run_ranks(2, load_adapter, tmp_path)


def save_adapter(rank: int, world_size: int, root: Path) -> None:
    model = fully_shard(adapter(seed=1))
    save_once(root, TrainState(model=model), trainable_only=True)


def load_adapter(rank: int, world_size: int, root: Path) -> None:
    names = {
        *dcp.FileSystemReader(root / "step-00000001" / "weights")
        .read_metadata()
        .state_dict_metadata
    }
    assert names == {"model.1.weight"}
    model = fully_shard(adapter(seed=2))
    restore(root, TrainState(model=model))
    assert_bit_equal(state_bytes(fully_shard(adapter(seed=1))), state_bytes(model))
    other = fully_shard(adapter(seed=2, base_seed=7))
    before = state_bytes(other)
    with pytest.raises(BaseMismatch, match="fingerprint"):
        restore(root, TrainState(model=other))
    assert_bit_equal(before, state_bytes(other))
    bigger = fully_shard(nn.Sequential(*adapter(seed=2), nn.Linear(8, 8)))
    with pytest.raises(StateMismatch, match=r"model\.2\.weight: missing"):
        restore(root, TrainState(model=bigger))


def test_a_metadata_file_with_code_in_it_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    """P74: metadata is an ordinary pickle."""
    model = nn.Linear(2, 2)
    save_once(tmp_path, TrainState(model=model))
    weights = tmp_path / "step-00000001" / "weights"
    shutil.copytree(weights, tmp_path / "foreign")
    (tmp_path / "foreign" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    with pytest.raises(CorruptCheckpoint, match="nothing of it was run"):
        restore(tmp_path / "foreign", TrainState(model=model))
    assert not (tmp_path / "ran").exists()


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_an_object_with_code_in_it_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    """P74: no option of the product loads foreign pickles."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fields = {"lr": Bomb(tmp_path / "ran"), "momentum": 0.0}
    state = {
        "model": model.state_dict(),
        "optimizer": {
            f"param_groups.{n}.{k}": v for n in ("weight", "bias") for k, v in fields.items()
        },
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, checkpoint_id=tmp_path / "foreign")
    (tmp_path / "ran").unlink(missing_ok=True)
    with pytest.raises(CorruptCheckpoint, match="no plain value"):
        restore(
            tmp_path / "foreign",
            TrainState(model=model, optimizer=optimizer),
            only=("model", "optimizer"),
        )
    assert not (tmp_path / "ran").exists()
