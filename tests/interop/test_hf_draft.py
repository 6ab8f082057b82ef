"""Drafts of exports: invisible until published, and removed only when nobody works on them."""

import os
import signal
from pathlib import Path

import pytest

from backstay.errors import InvalidArgument
from backstay.interop.hf_draft import Draft, sweep
from backstay.testing import run_ranks


def names(folder: Path) -> set[str]:
    return {*os.listdir(folder)}


def test_a_draft_becomes_visible_whole_or_not_at_all(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "deep/out")
    (draft.path / "file").write_text("content")
    assert not (tmp_path / "deep/out").exists()
    draft.publish()
    draft.discard()
    assert names(tmp_path / "deep") == {"out"}
    assert names(tmp_path / "deep/out") == {"file"}


def test_a_discarded_draft_leaves_nothing(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "out", "source")
    assert draft.path.name.startswith(".out.source-")
    (draft.path / "folder").mkdir()
    draft.discard()
    assert names(tmp_path) == set()


def test_what_came_in_between_is_not_replaced(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidArgument, match="never overwritten"):
        draft.publish()
    draft.discard()
    assert names(tmp_path) == {"out"}


def die_with_drafts(rank: int, world_size: int, folder: Path) -> None:
    for kind in ("incomplete", "source"):
        (Draft(folder / "dead", kind).path / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def test_only_drafts_of_the_dead_are_swept(tmp_path: Path) -> None:
    run_ranks(1, die_with_drafts, tmp_path, distributed=False, allow_death=[0])
    assert len(names(tmp_path)) == 4
    alive = Draft(tmp_path / "alive")
    foreign = {"step_notes", "mine.incomplete-01234567", ".x.lock"}
    for name in foreign:
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == {
        alive.path.name,
        f".{alive.path.name}.lock",
        *foreign,
    }
    sweep(tmp_path / "not-there")
    alive.discard()
