"""What a run goes on from: its own checkpoints first, then what was named, and never silently nothing."""

from pathlib import Path

import pytest
from torch import nn

from backstay import Checkpointer, TrainState
from backstay.coordination import Coordination
from backstay.errors import CheckpointNotFound, NoUsableCheckpoint, UsedRoot
from backstay.training.resume import find_earlier

RANKS = Coordination(timeout_s=10)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with checkpoints of steps 3 and 5."""
    return write_root(tmp_path_factory.mktemp("used") / "checkpoints", "first", [3, 5])


def write_root(path: Path, name: str, steps: list[int]) -> Path:
    extra = {"config": {"out": name}, "identity": {"model": "abc"}, "evaluated": 3}
    with Checkpointer(path, TrainState(model=nn.Linear(2, 2), extra=extra)) as checkpointer:
        for step in steps:
            checkpointer.save(step)
    return path


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_an_empty_or_missing_directory_is_a_fresh_start(resume: str, tmp_path: Path) -> None:
    assert find_earlier(tmp_path, resume, RANKS) is None
    assert find_earlier(tmp_path / "none", resume, RANKS) is None


def test_the_newest_checkpoint_says_what_its_run_was(root: Path) -> None:
    found = find_earlier(root, "auto", RANKS)
    assert found is not None
    assert (found.path, found.step) == (root, 5)
    assert (found.config, found.identity) == ({"out": "first"}, {"model": "abc"})


def test_never_refuses_a_used_directory_even_if_nothing_was_committed(
    root: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsedRoot, match="resume=never would not go on"):
        find_earlier(root, "never", RANKS)
    (tmp_path / "step-00000003").mkdir()
    with pytest.raises(UsedRoot):
        find_earlier(tmp_path, "never", RANKS)


@pytest.mark.parametrize(("name", "step"), [("", 5), ("step-00000003", 3)])
def test_a_root_or_one_checkpoint_can_be_named(
    name: str, step: int, root: Path, tmp_path: Path
) -> None:
    found = find_earlier(tmp_path / "own", str(root / name), RANKS)
    assert found is not None
    assert (found.path, found.step) == (root / name, step)


def test_a_run_that_came_from_elsewhere_goes_on_from_its_own(root: Path, tmp_path: Path) -> None:
    own = write_root(tmp_path / "own", "second", [1])
    found = find_earlier(own, str(root), RANKS)
    assert found is not None
    assert (found.path, found.step) == (own, 1)


@pytest.mark.parametrize("name", ["empty", "missing", "file", "step-00000009"])
def test_what_was_named_has_to_be_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotFound, match="there is no"):
        find_earlier(tmp_path / "own", str(tmp_path / name), RANKS)


def test_checkpoints_that_are_all_damaged_are_no_fresh_start(tmp_path: Path) -> None:
    root = write_root(tmp_path / "checkpoints", "first", [1])
    for file in root.glob("step-*/weights/*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(NoUsableCheckpoint):
        find_earlier(root, "auto", RANKS)
