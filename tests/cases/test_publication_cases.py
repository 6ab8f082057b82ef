"""Field cases of themes D and E: what counts as a checkpoint, and what is deleted when."""

import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from loops import train_state
from torch import nn

from backstay import Catalog, Checkpointer, RetentionPolicy, TrainState, restore
from backstay.errors import (
    CorruptCheckpoint,
    NoUsableCheckpoint,
    RanksDisagree,
    SaveFailed,
    StepExists,
    UsedRoot,
)
from backstay.points import ALL_POINTS
from backstay.testing import Gate, fail_at, inject, kill_at, run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.models import make_training, train_step

# From here on the checkpoint has its final name and its manifest.
AFTER_PUBLICATION = {"commit.fsync_parent", "prune.manifest", "prune.file", "prune.last"}
# The trainer is killed here before everything is staged; at "save.submit" all is copied, but the writer does not know it.
SAVING_POINTS = [point for point in ALL_POINTS if not point.startswith("load.")]


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_at(root: Path, step: int | None = None) -> float:
    """What the checkpoint of a step, or the newest, holds."""
    model = model_of(-1)
    restore(root, TrainState(model=model), step=step)
    return model.weight[0, 0].item()


def steps_of(root: Path) -> list[int]:
    return [entry.step for entry in Catalog(root).list()]


@pytest.mark.parametrize("point", SAVING_POINTS)
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint_to_resume_from(
    tmp_path: Path, point: str
) -> None:
    """P14: resume picks the newest directory, which is half written."""
    run_ranks(1, save_and_be_killed, tmp_path, point, distributed=False, allow_death=[0])
    newest = Catalog(tmp_path).latest()
    assert newest is not None
    assert newest.step == (20 if point in AFTER_PUBLICATION else 10)
    assert value_at(tmp_path) == newest.step
    if point not in AFTER_PUBLICATION:
        with Checkpointer(tmp_path, TrainState(model=model_of(30))) as checkpointer:
            assert checkpointer.restore() == 10
            checkpointer.save(20)
        assert value_at(tmp_path) == 10


def save_and_be_killed(rank: int, world_size: int, root: Path, point: str) -> None:
    """Step 10 is saved in peace; at step 20 whoever comes to the point is killed, and the trainer after it."""
    with Checkpointer(root, TrainState(model=model_of(10))) as checkpointer:
        checkpointer.save(10)
    with (
        inject(kill_at(point)),
        Checkpointer(
            root, TrainState(model=model_of(0)), keep=RetentionPolicy(last=1)
        ) as checkpointer,
    ):
        checkpointer.restore()
        with torch.no_grad():
            for parameter in checkpointer.state.model.parameters():
                parameter.fill_(20)
        pending = checkpointer.save(20)
        pending.committed.exception(20)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "name",
    ["weights/.metadata", "weights/__0_0.distcp", "state.json", "rng/rank-00000.safetensors"],
)
@pytest.mark.parametrize("how", ["removed", "cut short"])
def test_a_checkpoint_with_a_file_missing_is_passed_over(
    tmp_path: Path, name: str, how: str
) -> None:
    """P14: resume accepts only what is whole, and says what it skipped and why."""
    with Checkpointer(tmp_path, TrainState(model=model_of(10))) as checkpointer:
        checkpointer.save(10)
        checkpointer.save(30)
    path = tmp_path / "step-00000030" / name
    if how == "removed":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptCheckpoint, match=name.rpartition("/")[2]):
        restore(tmp_path, TrainState(model=model_of(0)), step=30)
    assert restore(tmp_path, TrainState(model=model_of(0))) == 10


def test_a_root_whose_checkpoints_are_all_damaged_is_refused(tmp_path: Path) -> None:
    """P28: automatic resume that finds no usable checkpoint refuses to start from scratch."""
    with Checkpointer(tmp_path, TrainState(model=model_of(10))) as checkpointer:
        checkpointer.save(10)
    (tmp_path / "step-00000010" / "manifest.json").write_text("{}")
    with pytest.raises(NoUsableCheckpoint, match="step 10"):
        restore(tmp_path, TrainState(model=model_of(0)))


def test_the_newest_is_what_is_committed_not_what_is_being_written(tmp_path: Path) -> None:
    """P15: the latest pointer moves before the data is there. There is no pointer."""
    with (
        Gate(tmp_path / "gate", "commit.manifest", nth=2) as gate,
        inject(gate.action),
        Checkpointer(tmp_path / "run", TrainState(model=model_of(1))) as checkpointer,
    ):
        checkpointer.save(10)
        checkpointer.save(20)
        gate.wait_reached()
        assert steps_of(tmp_path / "run") == [10]
        gate.open()
        checkpointer.wait()
        assert steps_of(tmp_path / "run") == [10, 20]


@pytest.mark.parametrize("file", range(4))
@pytest.mark.parametrize("point", ["write.create", "commit.manifest"])
def test_a_failure_of_any_side_file_leaves_the_older_selection(
    tmp_path: Path, point: str, file: int
) -> None:
    """P16: pointer published before the last piece of metadata. The four files come in a fixed order."""
    nth = 5 + file if point == "write.create" else 2
    with (
        inject(fail_at(point, "EIO", nth=nth)),
        Checkpointer(tmp_path, TrainState(model=model_of(10))) as checkpointer,
    ):
        checkpointer.save(10)
        checkpointer.save(20)
        with pytest.raises(SaveFailed, match="step 20"):
            checkpointer.wait()
    assert steps_of(tmp_path) == [10]
    assert Catalog(tmp_path).incomplete() == []


def test_only_rank_0_publishes_and_all_agree_on_a_failed_rename(tmp_path: Path) -> None:
    """P17: all ranks rename, or rename is not atomic."""
    assert run_ranks(2, fail_to_rename, tmp_path, timeout_s=30) == [[2], [2]]


def fail_to_rename(rank: int, world_size: int, root: Path) -> list[int]:
    training = make_training("fsdp2")
    train_step(training)
    with (
        inject(kill_at("commit.rename", rank=1), fail_at("commit.rename", "ENOENT", rank=0)),
        Checkpointer(root, train_state(training)) as checkpointer,
    ):
        checkpointer.save(1)
        with pytest.raises(SaveFailed, match="rank 0"):
            checkpointer.wait()
        train_step(training)
        checkpointer.save(2)
    return steps_of(root)


def test_a_full_disk_on_one_rank_leaves_no_leftovers_and_the_next_save_works(
    tmp_path: Path,
) -> None:
    """P19: disk full: half a checkpoint, and the old one already removed."""
    assert run_ranks(2, fill_the_disk, tmp_path, timeout_s=30) == [[1, 3], [1, 3]]


def fill_the_disk(rank: int, world_size: int, root: Path) -> list[int]:
    training = make_training("fsdp2")
    with (
        inject(fail_at("write.last_chunk", "ENOSPC", rank=1, nth=5)),
        Checkpointer(
            root, train_state(training), keep=RetentionPolicy(last=2), on_failure="warn"
        ) as checkpointer,
    ):
        for step in range(1, 4):
            train_step(training)
            checkpointer.save(step)
            if step == 2:
                error = checkpointer._saver._outcomes.flight.pending.committed.exception(20)  # type: ignore[union-attr]
                assert "ENOSPC" in str(error)
    assert not list(root.glob("*.incomplete-*"))
    return steps_of(root)


def test_ranks_with_different_roots_or_steps_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    """P20: ranks compute different output directories."""
    run_ranks(2, disagree, tmp_path, timeout_s=30)
    assert os.listdir(tmp_path) == ["run"]
    assert os.listdir(tmp_path / "run") == []


def disagree(rank: int, world_size: int, root: Path) -> None:
    with pytest.raises(RanksDisagree, match=r"(?s)rank 0: .*run-0.*rank 1: .*run-1"):
        Checkpointer(root / f"run-{rank}", TrainState(model=model_of(0)))
    with Checkpointer(root / "run", TrainState(model=model_of(0))) as checkpointer:
        with pytest.raises(RanksDisagree, match=r"(?s)rank 0: step 5.*rank 1: step 6"):
            checkpointer.save(5 + rank)
        checkpointer._last_seen = None


def test_an_existing_step_is_never_overwritten(tmp_path: Path) -> None:
    """P17: a publish that finds the target already there is an error with a plan."""
    run_ranks(2, save_twice, tmp_path)
    assert value_at(tmp_path) == 1


def save_twice(rank: int, world_size: int, root: Path) -> None:
    model = model_of(1)
    with Checkpointer(root, TrainState(model=model)) as checkpointer:
        checkpointer.save(1).wait(20)
        nn.init.zeros_(model.weight)
        with pytest.raises(StepExists, match="committed already"):
            checkpointer.save(1)


# Theme E ---------------------------------------------------------------------------------------------------------------


def test_the_only_checkpoint_stays_while_its_successor_is_written(tmp_path: Path) -> None:
    """P21: retention removes the only complete checkpoint while its successor is being written."""
    run = tmp_path / "run"
    with (
        Gate(tmp_path / "gate", "commit.rename", nth=2) as gate,
        inject(gate.action),
        Checkpointer(
            run, TrainState(model=model_of(1)), keep=RetentionPolicy(last=1)
        ) as checkpointer,
    ):
        checkpointer.save(10)
        checkpointer.save(20)
        gate.wait_reached()
        assert steps_of(run) == [10]
        gate.open()
    assert steps_of(run) == [20]


def test_a_run_that_does_not_resume_may_not_write_into_a_used_root(tmp_path: Path) -> None:
    """P22: a fresh run in a used directory deletes its own new checkpoint."""
    with Checkpointer(tmp_path, TrainState(model=model_of(7))) as checkpointer:
        checkpointer.save(700)
    with Checkpointer(
        tmp_path, TrainState(model=model_of(1)), keep=RetentionPolicy(last=1)
    ) as other:
        with pytest.raises(UsedRoot, match="700"):
            other.maybe_save(1)
        with pytest.raises(UsedRoot, match="700"):
            other.save(10)
    assert steps_of(tmp_path) == [700]
    assert value_at(tmp_path) == 7


def test_a_run_that_went_back_may_not_write_below_newer_steps(tmp_path: Path) -> None:
    """P22: what was just written must not be what retention takes for the oldest."""
    with Checkpointer(tmp_path, TrainState(model=model_of(7))) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    with Checkpointer(tmp_path, TrainState(model=model_of(1))) as other:
        assert other.restore(1) == 1
        with pytest.raises(UsedRoot, match="newer steps 2"):
            other.maybe_save(2)


def test_the_best_and_the_newest_stay_whatever_their_names_and_times(tmp_path: Path) -> None:
    """P23: the wrong one goes: best/last swapped, mtime ties, names sorted as text."""
    keep = RetentionPolicy(last=2, best=1, metric="loss")
    with Checkpointer(tmp_path, TrainState(model=model_of(1)), keep=keep) as checkpointer:
        for step, loss in [(1, 0.1), (2, 5), (9, 4), (10, 3), (11, 2)]:
            checkpointer.save(step, metrics={"loss": loss}).wait(20)
            os.utime(tmp_path / "step-00000001")
    assert steps_of(tmp_path) == [1, 10, 11]


def test_a_failing_deletion_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P24: a failing deletion stops training; a checkpoint removed by hand breaks the bookkeeping."""
    with (
        inject(fail_at("prune.file", "EBUSY")),
        caplog.at_level(logging.WARNING, "backstay"),
        Checkpointer(
            tmp_path, TrainState(model=model_of(1)), keep=RetentionPolicy(last=2)
        ) as checkpointer,
    ):
        for step in range(1, 4):
            checkpointer.save(step).wait(20)
        os.rename(tmp_path / "step-00000002", tmp_path.parent / "taken-away")
        for step in range(4, 7):
            checkpointer.save(step).wait(20)
    assert steps_of(tmp_path) == [5, 6]
    assert "EBUSY" in caplog.text or "busy" in caplog.text


def test_directories_of_other_kinds_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    """P25: exports pile up or eat the checkpoint budget."""
    for name in ("step_notes", "step-00000004-hf", "exports"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "mine").write_text("mine")
    with Checkpointer(
        tmp_path, TrainState(model=model_of(1)), keep=RetentionPolicy(last=2)
    ) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step)
    assert steps_of(tmp_path) == [5, 6]
    for name in ("step_notes", "step-00000004-hf", "exports"):
        assert (tmp_path / name / "mine").read_text() == "mine"


def test_what_is_kept_can_still_be_loaded(tmp_path: Path) -> None:
    """P21: frozen files are shared between checkpoints by hard links; pruning one must not harm another."""
    training = make_training()
    with Checkpointer(
        tmp_path, train_state(training), keep=RetentionPolicy(last=1)
    ) as checkpointer:
        for step in range(1, 5):
            train_step(training)
            checkpointer.save(step)
    other = make_training(seed=3)
    restore(tmp_path, train_state(other), verify="full")
    expected = state_bytes(training.model, training.optimizers)
    assert_bit_equal(expected, state_bytes(other.model, other.optimizers))
