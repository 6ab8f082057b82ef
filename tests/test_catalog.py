"""The catalogue: what counts as a checkpoint, in which order, and why others are skipped."""

import logging
import os
from pathlib import Path

import pytest
import xxhash

from backstay.catalog import Catalog
from backstay.errors import CheckpointNotFound, CorruptCheckpoint, InvalidArgument
from backstay.manifest import FileRecord, Manifest

DATA = b"weights"


def add(root: Path, step: int, *, name: str | None = None) -> Path:
    """A committed checkpoint of one file."""
    path = root / (name or f"step-{step:08d}")
    (path / "weights").mkdir(parents=True)
    (path / "weights/__0_0.distcp").write_bytes(DATA)
    record = FileRecord(
        path="weights/__0_0.distcp",
        num_bytes=len(DATA),
        chunk_bytes=4096,
        chunk_hashes=(xxhash.xxh3_64_hexdigest(DATA),),
        role="trainable",
    )
    manifest = Manifest(
        step=step, run_id="r", attempt="0000000a-0001", world_size=1, created=0.0, files=(record,)
    )
    (path / "manifest.json").write_bytes(manifest.to_json())
    return path


def test_checkpoints_are_listed_by_number_not_by_text(tmp_path: Path) -> None:
    """P23: longer names are not smaller."""
    for step in (100_000_000, 99_999_999, 5):
        add(tmp_path, step)
    assert [entry.step for entry in Catalog(tmp_path).list()] == [5, 99_999_999, 100_000_000]


def test_a_root_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "nowhere")
    assert catalog.list() == catalog.incomplete() == catalog.find_live_attempts() == []
    assert catalog.latest() is None


def test_a_step_that_is_not_there_is_an_error_naming_those_that_are(tmp_path: Path) -> None:
    add(tmp_path, 5)
    add(tmp_path, 10)
    with pytest.raises(CheckpointNotFound, match="steps there: 5, 10"):
        Catalog(tmp_path).get(7)


def damage(path: Path, how: str) -> None:
    if how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "torn manifest":
        os.truncate(path / "manifest.json", 40)
    elif how == "edited manifest":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"world_size": 1', '"world_size": 2'))
    elif how == "short file":
        os.truncate(path / "weights/__0_0.distcp", 3)
    else:
        (path / "weights/__0_0.distcp").unlink()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no manifest", "no manifest.json"),
        ("torn manifest", "not a manifest"),
        ("edited manifest", "checksum"),
        ("short file", "has 3 bytes, expected 7"),
        ("lost file", "is missing"),
    ],
)
def test_the_newest_whole_one_is_found_and_the_skipped_are_logged(
    tmp_path: Path, how: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P14: a damaged newest checkpoint is passed over, loudly."""
    add(tmp_path, 1)
    damage(add(tmp_path, 2), how)
    with caplog.at_level(logging.WARNING, logger="backstay"):
        entry, skipped = Catalog(tmp_path).walk_back()
    assert entry is not None
    assert entry.step == 1
    assert [one.step for one in skipped] == [2]
    assert reason in skipped[0].reason
    assert reason in caplog.text


def test_an_unusable_step_asked_for_by_number_is_an_error(tmp_path: Path) -> None:
    damage(add(tmp_path, 2), "torn manifest")
    with pytest.raises(CorruptCheckpoint, match="step 2"):
        Catalog(tmp_path).get(2)


def test_a_flipped_byte_is_found_by_its_hash_only(tmp_path: Path) -> None:
    path = add(tmp_path, 2)
    (path / "weights/__0_0.distcp").write_bytes(b"weightz")
    entry = Catalog(tmp_path).get(2)
    assert entry.problems() == []
    assert len(entry.problems("full")) == 1
    with pytest.raises(InvalidArgument):
        entry.problems("none")


def test_incomplete_and_foreign_directories_are_no_checkpoints(tmp_path: Path) -> None:
    """P14, P25: neither a directory being written nor an export is taken for a checkpoint."""
    add(tmp_path, 1)
    (tmp_path / "step-00000002.incomplete-0000000a-0002").mkdir()
    (tmp_path / "step-00000003-export").mkdir()
    (tmp_path / "best").mkdir()
    catalog = Catalog(tmp_path)
    assert [entry.step for entry in catalog.scan()[0]] == [1]
    assert catalog.scan()[1] == []
    assert [(one.step, one.attempt, one.is_live) for one in catalog.incomplete()] == [
        (2, "0000000a-0002", False)
    ]


def test_links_out_of_the_root_are_refused(tmp_path: Path) -> None:
    elsewhere = add(tmp_path / "elsewhere", 9)
    root = tmp_path / "root"
    add(root, 1)
    (root / "step-00000009").symlink_to(elsewhere)
    file = add(root, 8) / "weights/__0_0.distcp"
    file.unlink()
    file.symlink_to(elsewhere / "weights/__0_0.distcp")
    entry, skipped = Catalog(root).walk_back()
    assert entry is not None
    assert entry.step == 1
    assert ["leads out of" in one.reason for one in skipped] == [True, True]


def test_a_renamed_directory_is_not_taken_for_another_step(tmp_path: Path) -> None:
    add(tmp_path, 5, name="step-00000006")
    entry, skipped = Catalog(tmp_path).walk_back()
    assert entry is None
    assert "holds step 5" in skipped[0].reason
