"""DCP metadata is read as data: what stock writes comes back, what would run code is refused."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from backstay.errors import CorruptCheckpoint
from backstay.load.metadata import read_metadata

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own words on single-process saves


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"model": {"a": torch.ones(3, 2), "b": torch.zeros((), dtype=torch.bfloat16)}, "n": 3}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "c"), no_dist=True)
    return tmp_path / "c"


def rewrite(checkpoint: Path, value: object) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(value))


def test_stock_metadata_comes_back_equal(checkpoint: Path) -> None:
    found = read_metadata(checkpoint)
    stock = pickle.loads((checkpoint / ".metadata").read_bytes())
    assert found.state_dict_metadata == stock.state_dict_metadata
    assert found.storage_data == stock.storage_data
    assert found.planner_data == stock.planner_data


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.target),))


def test_p74_a_pickle_that_runs_code_is_refused_and_runs_nothing(checkpoint: Path) -> None:
    """P74: metadata is an ordinary pickle."""
    target = checkpoint.parent / "made"
    rewrite(checkpoint, Hostile(target))
    with pytest.raises(CorruptCheckpoint, match=r"asks for posix.mkdir"):
        read_metadata(checkpoint)
    assert not target.exists()


@pytest.mark.parametrize("relative", ["../x.distcp", "/etc/passwd"])
def test_a_data_file_outside_the_directory_is_refused(checkpoint: Path, relative: str) -> None:
    stock = pickle.loads((checkpoint / ".metadata").read_bytes())
    next(iter(stock.storage_data.values())).relative_path = relative
    rewrite(checkpoint, stock)
    with pytest.raises(CorruptCheckpoint, match="outside"):
        read_metadata(checkpoint)


def test_a_link_out_of_the_directory_is_refused(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    (checkpoint / "__0_0.distcp").symlink_to("/etc/passwd")
    with pytest.raises(CorruptCheckpoint, match="outside"):
        read_metadata(checkpoint)


def test_a_chunk_larger_than_its_tensor_is_refused(checkpoint: Path) -> None:
    stock = pickle.loads((checkpoint / ".metadata").read_bytes())
    stock.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size([4, 2])
    rewrite(checkpoint, stock)
    with pytest.raises(CorruptCheckpoint, match="leaves the tensor's shape"):
        read_metadata(checkpoint)


def test_every_truncation_is_refused(checkpoint: Path) -> None:
    whole = (checkpoint / ".metadata").read_bytes()
    for length in range(len(whole)):
        (checkpoint / ".metadata").write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpoint):
            read_metadata(checkpoint)


@pytest.mark.parametrize("value", [{}, None, 3, "text"])
def test_a_pickle_of_something_else_is_refused(checkpoint: Path, value: object) -> None:
    rewrite(checkpoint, value)
    with pytest.raises(CorruptCheckpoint, match="expected DCP metadata"):
        read_metadata(checkpoint)
