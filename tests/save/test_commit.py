"""From the ranks' records to one published checkpoint, and every way in which that fails."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_trainer import FakeTrainer, content, wait_until

from backstay.attempts import (
    DoneRecord,
    hold_lock,
    is_committed,
    is_live,
    put_done,
    read_lock,
    record_failure,
)
from backstay.catalog import Catalog
from backstay.points import WRITER_POINTS, Action
from backstay.save.messages import BeginSave, Committed, Failed, FileSource
from backstay.save.rank_write import trainable_digest

Make = Callable[..., FakeTrainer]
ATTEMPT = "0000000a-0001"
POINTS_BEFORE_COMMIT = tuple(
    point for point in WRITER_POINTS if point.startswith(("write.", "commit."))
)


@pytest.mark.parametrize("point", POINTS_BEFORE_COMMIT)
def test_an_error_anywhere_fails_the_save_and_leaves_nothing(
    make_trainer: Make, root: Path, point: str
) -> None:
    """P11, P19: the error is reported with its cause, no checkpoint and no partial directory stays, the next save works."""
    trainer = make_trainer(actions=(Action(point=point, kind="raise", nth=1),))
    outcome = trainer.save(1)
    assert isinstance(outcome, Failed)
    assert (outcome.kind, outcome.rank) == ("EIO", 0)
    assert point in outcome.cause
    assert isinstance(trainer.save(2), Committed)
    assert [name for name in os.listdir(root) if name.startswith("step")] == ["step-00000002"]


@pytest.mark.parametrize("point", ["write.create", "write.last_chunk", "write.done_record"])
def test_an_error_on_one_rank_fails_the_save_on_all(
    make_trainer: Make, root: Path, point: str
) -> None:
    actions = (Action(point=point, kind="raise", rank=1, errno_name="ENOSPC"),)
    ranks = [make_trainer(rank=rank, world_size=2, actions=actions) for rank in range(2)]
    for one in ranks:
        one.submit(one.begin(5), 5, content(one.rank))
    outcomes = [one.outcome() for one in ranks]
    assert {(one.rank, one.kind) for one in outcomes if isinstance(one, Failed)} == {(1, "ENOSPC")}
    assert Catalog(root).list() == []


@pytest.fixture
def tiny_root(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiny"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "backstay-test", str(path)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield path / "run"
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_fails_the_save_and_keeps_the_previous_checkpoint(tiny_root: Path) -> None:
    """P19: with a real file system that runs full; the space is free again afterwards."""
    trainer = FakeTrainer(tiny_root, retention={"last": 1})
    assert isinstance(trainer.save(1), Committed)
    outcome = trainer.save(2, bytes(2 << 20))
    assert isinstance(outcome, Failed)
    assert outcome.kind == "ENOSPC"
    assert "__0_0.distcp" in outcome.cause
    assert [entry.step for entry in Catalog(tiny_root).list()] == [1]
    assert isinstance(trainer.save(3), Committed)
    assert trainer.writer.close() == 0


def test_a_root_that_cannot_be_made_fails_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trainer = FakeTrainer(tmp_path / "file" / "run")
    outcome = trainer.save(1)
    assert isinstance(outcome, Failed)
    assert outcome.kind in ("ENOTDIR", "EEXIST")
    trainer.writer.close()


def test_a_missing_rank_is_named_when_the_time_is_up(make_trainer: Make) -> None:
    trainer = make_trainer(world_size=3, commit_timeout_s=0.3)
    outcome = trainer.save(1)
    assert isinstance(outcome, Failed)
    assert outcome.kind == "CommitTimeout"
    assert outcome.cause == "ranks 1, 2 of 3 did not finish writing within 0.3 s"


def test_an_existing_step_is_not_overwritten(trainer: FakeTrainer, root: Path) -> None:
    trainer.save(1)
    outcome = trainer.save(1, content(9))
    assert isinstance(outcome, Failed)
    assert outcome.kind == "StepExists"
    assert (root / "step-00000001/weights/__0_0.distcp").read_bytes() == content(1)


@pytest.mark.parametrize("damage", ["no manifest", "torn manifest", "short file", "lost file"])
def test_a_damaged_directory_of_that_step_is_set_aside(
    trainer: FakeTrainer, root: Path, damage: str
) -> None:
    trainer.save(1)
    path = root / "step-00000001"
    if damage == "no manifest":
        (path / "manifest.json").unlink()
    elif damage == "torn manifest":
        (path / "manifest.json").write_bytes(b"{")
    elif damage == "short file":
        os.truncate(path / "weights/__0_0.distcp", 5)
    else:
        (path / "weights/__0_0.distcp").unlink()
    assert isinstance(trainer.save(1), Committed)
    assert (root / "step-00000001.damaged-0000000a-0002").is_dir()
    assert Catalog(root).get(1).problems() == []
    assert any("set aside" in note for note in trainer.drain_notes())


def test_files_of_another_root_are_noticed(make_trainer: Make, root: Path, tmp_path: Path) -> None:
    """P20: a rank recorded files that rank 0 cannot see."""
    trainer = make_trainer(world_size=2)
    stranger = FakeTrainer(tmp_path / "elsewhere", rank=1, world_size=2)
    attempt = trainer.begin(5)
    stranger.submit(stranger.begin(5), 5, content(1))
    record = tmp_path / "elsewhere" / ".attempts" / attempt / "rank-00001.done"
    wait_until(record.exists)
    wait_until((root / ".attempts" / attempt / "rank-00000.lock").exists)
    (root / ".attempts" / attempt / "rank-00001.done").write_bytes(record.read_bytes())
    trainer.submit(attempt, 5, content(0))
    outcome = trainer.outcome()
    assert isinstance(outcome, Failed)
    assert "cannot be seen by rank 0" in outcome.cause
    stranger.writer.close(timeout_s=0)


def test_an_attempt_whose_directory_vanishes_fails(make_trainer: Make, root: Path) -> None:
    trainer = make_trainer(rank=1, world_size=2)
    trainer.submit(trainer.begin(5), 5, content(1))
    wait_until((root / ".attempts" / ATTEMPT / "rank-00001.done").exists)
    shutil.rmtree(root / ".attempts")
    outcome = trainer.outcome()
    assert isinstance(outcome, Failed)
    assert "was removed" in outcome.cause


def test_an_unchanged_file_is_linked_not_written(trainer: FakeTrainer, root: Path) -> None:
    trainer.save(1)
    assert isinstance(trainer.save(2, content(2), extra_files=(linked(10_000),)), Committed)
    entry = Catalog(root).get(2)
    assert (entry.path / "weights/__0_1.distcp").samefile(
        root / "step-00000001/weights/__0_0.distcp"
    )
    assert entry.problems("full") == []


def test_a_link_to_something_else_than_expected_fails_the_save(trainer: FakeTrainer) -> None:
    trainer.save(1)
    outcome = trainer.save(2, content(2), extra_files=(linked(9_999),))
    assert isinstance(outcome, Failed)
    assert "10000 bytes" in outcome.cause


def test_write_slots_let_one_writer_of_a_node_write_at_a_time(
    make_trainer: Make, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = Action(point="write.first_chunk", kind="hold", rank=0, path=str(gate), seconds=20)
    ranks = [
        make_trainer(rank=rank, world_size=2, write_slots=1, actions=(held,)) for rank in range(2)
    ]
    attempt = ranks[0].begin(5)
    ranks[0].submit(attempt, 5, content(0))
    wait_until(Path(f"{gate}.reached").exists)
    ranks[1].submit(ranks[1].begin(5), 5, content(1))
    lock = tmp_path / "run/.attempts" / attempt / "rank-00001.lock"
    wait_until(lock.exists)
    assert not lock.with_suffix(".done").exists()
    gate.touch()
    assert all(isinstance(one.outcome(), Committed) for one in ranks)


def test_the_bandwidth_cap_is_kept(make_trainer: Make) -> None:
    trainer = make_trainer(bandwidth_bytes_per_s=1 << 20)
    outcome = trainer.save(1, bytes(512 << 10))
    assert isinstance(outcome, Committed)
    assert outcome.seconds > 0.4


def test_a_failed_begin_is_answered_once(make_trainer: Make, root: Path) -> None:
    trainer = make_trainer()
    root.touch()
    attempt = trainer.begin(1)
    trainer.submit(attempt, 1, content(1))
    outcome = trainer.outcome()
    assert isinstance(outcome, Failed)
    root.unlink()
    assert isinstance(trainer.save(2), Committed)
    assert trainer.heard.empty()


def test_the_writer_never_blocks_on_a_second_begin(trainer: FakeTrainer) -> None:
    first = trainer.begin(1)
    trainer.writer.send(BeginSave(attempt="0000000a-0099", step=2))
    trainer.submit(first, 1, content(1))
    assert isinstance(trainer.outcome(), Committed)
    trainer.submit("0000000a-0099", 2, content(2))
    assert isinstance(trainer.outcome(), Committed)


def test_a_lock_is_seen_held_then_free(root: Path) -> None:
    (root / ".attempts" / ATTEMPT).mkdir(parents=True)
    fd = hold_lock(root, ATTEMPT, rank=3, step=8)
    lock = read_lock(root, ATTEMPT, 3)
    assert lock is not None
    assert (lock.is_held, lock.is_here, lock.step, lock.pid) == (True, True, 8, os.getpid())
    assert is_live(root, ATTEMPT)
    os.close(fd)
    assert not is_live(root, ATTEMPT)


def test_a_lock_file_that_a_power_cut_emptied_is_nobodys(root: Path) -> None:
    (root / ".attempts" / ATTEMPT).mkdir(parents=True)
    (root / ".attempts" / ATTEMPT / "rank-00000.lock").touch()
    lock = read_lock(root, ATTEMPT, 0)
    assert lock is not None
    assert not lock.is_held
    assert not lock.is_here


def test_a_dead_writer_that_had_done_its_part_is_no_failure(root: Path) -> None:
    (root / ".attempts" / ATTEMPT).mkdir(parents=True)
    record = DoneRecord(
        rank=1, host="h", files=(), seconds=0, hash_seconds=0, cpu_seconds=0, direct=True
    )
    put_done(root, ATTEMPT, record)
    assert record_failure(root, ATTEMPT, step=1, rank=1, kind="WriterDied", cause="?") == "written"
    assert record_failure(root, ATTEMPT, step=1, rank=2, kind="WriterDied", cause="?") == "failed"
    assert not is_committed(root, ATTEMPT, 1)


def test_nothing_trainable_has_no_digest() -> None:
    assert trainable_digest([]) == ""


def linked(num_bytes: int) -> FileSource:
    """A frozen file that is to be the trainable one of step 1."""
    return FileSource(
        path="weights/__0_1.distcp",
        role="frozen",
        num_bytes=num_bytes,
        link_from="step-00000001/weights/__0_0.distcp",
    )
