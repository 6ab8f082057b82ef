"""A folder made of stored tensors: from uneven and empty shards, in any dtype, and by a writer whose trainer is gone."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from backstay import Catalog, Checkpointer, TrainState
from backstay.errors import InvalidArgument, StateError
from backstay.save.assembled import Assembled, Chunk, make_recipes
from backstay.testing import run_ranks

ROWS = (5, 1, 4)


def folder_of(model: nn.Module) -> Assembled:
    names = {f"m.{name}": f"model.{name}" for name, _ in model.named_parameters()}
    return Assembled(folder="extra", weights="m.safetensors", tensors=names, files={"a.txt": b"a"})


def save_one(rank: int, _: int, root: Path, dtype: torch.dtype, dies: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(3, rows) for rows in ROWS]).to(dtype)
    whole = {f"m.{name}": value.detach().clone() for name, value in model.named_parameters()}
    if rank == 0:
        torch.save(whole, root.with_suffix(".pt"))
    fully_shard(model)
    assert isinstance(model[1].weight, DTensor)
    with Checkpointer(
        root, TrainState(model=model), assembled=folder_of(model), chunk_bytes=4096
    ) as saves:
        for step in range(1, 4):
            pending = saves.save(step)
            if dies:
                pending.staged.result(30)
                os.kill(os.getpid(), signal.SIGKILL)
            saves.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uneven_and_empty_shards_become_whole_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    run_ranks(2, save_one, tmp_path / "run", dtype, False)
    expected = torch.load(tmp_path / "run.pt")
    entries = Catalog(tmp_path / "run").list()
    assert entries
    for entry in entries:
        assert entry.problems("full") == []
        found = load_file(entry.path / "extra" / "m.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert (entry.path / "extra" / "a.txt").read_bytes() == b"a"


def refuse_one(rank: int, _: int, root: Path) -> str:
    model = nn.Linear(2, 2)
    wrong = Assembled(folder="extra", weights="m", tensors={"a": "model.none"})
    with (
        pytest.raises(StateError, match=r"model\.none") as caught,
        Checkpointer(root, TrainState(model=model), assembled=wrong) as saves,
    ):
        saves.save(1)
    return type(caught.value).__name__


def test_an_unknown_name_is_refused_on_all_ranks(tmp_path: Path) -> None:
    assert len(run_ranks(2, refuse_one, tmp_path / "run")) == 2
    assert Catalog(tmp_path / "run").list() == []


def test_columns_are_put_together_row_by_row() -> None:
    chunks = [
        Chunk("weights/a", 64, torch.float32, (0, 0), (2, 2)),
        Chunk("weights/b", 0, torch.float32, (0, 2), (2, 1)),
    ]
    given = Assembled(folder="x", weights="w", tensors={"t": "model.t"})
    (recipe,) = make_recipes(given, {"model.t": chunks}, {"model.t": (2, 3)})
    assert recipe.ranges == (
        ("weights/a", 64, 8),
        ("weights/b", 0, 4),
        ("weights/a", 72, 8),
        ("weights/b", 4, 4),
    )


@pytest.mark.parametrize("folder", ["weights", "..", "a/b"])
def test_a_folder_that_is_taken_is_refused(folder: str) -> None:
    with pytest.raises(InvalidArgument, match="expected plain"):
        Assembled(folder=folder, weights="w", tensors={})


def test_the_writer_makes_it_after_the_trainers_death(tmp_path: Path) -> None:
    run_ranks(2, save_one, tmp_path / "run", torch.float32, True, allow_death=(0, 1))
    deadline = time.monotonic() + 20
    while not (entries := Catalog(tmp_path / "run").list()) and time.monotonic() < deadline:
        time.sleep(0.02)
    (entry,) = entries
    assert entry.problems("full") == []
    expected = torch.load(tmp_path / "run.pt")
    found = load_file(entry.path / "extra" / "m.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
