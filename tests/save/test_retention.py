"""What is pruned, in which order, and what is never touched."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_trainer import FakeTrainer, content, wait_until

from backstay.catalog import Catalog
from backstay.points import Action
from backstay.save.messages import Committed, Failed

Make = Callable[..., FakeTrainer]


def steps(root: Path) -> list[int]:
    return [entry.step for entry in Catalog(root).list()]


def leftovers(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if ".pruned-" in name or ".incomplete-" in name)


def test_the_last_k_stay(make_trainer: Make, root: Path) -> None:
    trainer = make_trainer(retention={"last": 2})
    for step in (1, 2, 3, 4):
        trainer.save(step)
    trainer.writer.close()
    assert steps(root) == [3, 4]
    assert leftovers(root) == []


def test_steps_are_ordered_as_numbers(make_trainer: Make, root: Path) -> None:
    """P23: 99,999,999 comes before 100,000,000, though not as text."""
    trainer = make_trainer(retention={"last": 1})
    trainer.save(99_999_999)
    trainer.save(100_000_000)
    trainer.writer.close()
    assert steps(root) == [100_000_000]


def test_the_best_and_the_tagged_stay(make_trainer: Make, root: Path) -> None:
    """P23: best by the metric, last by the step, each kept for its own reason."""
    trainer = make_trainer(retention={"last": 1, "best": 1, "metric": "loss"})
    for step, loss, tags in (
        (1, 0.9, ()),
        (2, 0.1, ()),
        (3, 0.5, ("release",)),
        (4, 0.7, ()),
        (5, 0.6, ()),
    ):
        trainer.save(step, metrics={"loss": loss}, tags=tags)
    trainer.writer.close()
    assert steps(root) == [2, 3, 5]


def test_nothing_is_pruned_while_the_successor_is_being_written(
    make_trainer: Make, root: Path
) -> None:
    """P21: the only complete checkpoint stays until the next one is committed, and if that fails."""
    trainer = make_trainer(
        retention={"last": 1}, actions=(Action(point="commit.rename", kind="raise", nth=2),)
    )
    trainer.save(1)
    assert isinstance(trainer.save(2), Failed)
    assert steps(root) == [1]
    assert Catalog(root).get(1).problems("full") == []


def test_a_new_run_in_a_used_root_keeps_its_own_and_the_others(
    make_trainer: Make, root: Path
) -> None:
    """P22: only checkpoints of the same run count, so a fresh run at step 1 does not lose against an old one at step 500."""
    old = make_trainer(run_id="old", retention={"last": 1})
    old.save(500)
    old.writer.close()
    new = make_trainer(run_id="new", retention={"last": 1}, incarnation="0000000b")
    new.save(1)
    new.save(2)
    new.writer.close()
    assert steps(root) == [2, 500]


def test_the_checkpoint_just_committed_stays_even_if_later_steps_are_there(
    make_trainer: Make, root: Path
) -> None:
    trainer = make_trainer(retention={"last": 1})
    trainer.save(500)
    trainer.save(400)
    trainer.writer.close()
    assert steps(root) == [400, 500]


def test_a_failing_deletion_is_noted_once_and_tried_again(make_trainer: Make, root: Path) -> None:
    """P24: training goes on; the deletion succeeds after a later commit."""
    failing = Action(point="prune.file", kind="raise", errno_name="EACCES", times=2)
    trainer = make_trainer(retention={"last": 1}, actions=(failing,))
    for step in (1, 2, 3):
        assert isinstance(trainer.save(step), Committed)
    assert trainer.save(4)
    notes = [note for note in trainer.drain_notes() if "could not remove" in note]
    assert steps(root) == [4]
    assert leftovers(root) == []
    assert len(notes) == 1
    assert "will try again" in notes[0]


@pytest.mark.parametrize("point", ["prune.manifest", "prune.file", "prune.last"])
def test_a_half_pruned_checkpoint_is_none_and_is_finished_later(
    make_trainer: Make, root: Path, point: str
) -> None:
    killed = make_trainer(retention={"last": 1}, actions=(Action(point=point, kind="kill"),))
    killed.save(1)
    assert isinstance(killed.save(2), Committed)
    killed.deaths.get(timeout=10)
    assert steps(root) == [2]
    assert leftovers(root) == ["step-00000001.pruned-0000000a-0002"]
    next_one = make_trainer(retention={"last": 1}, incarnation="0000000b")
    next_one.save(3)
    next_one.writer.close()
    assert steps(root) == [3]
    assert leftovers(root) == []


def test_what_backstay_did_not_make_is_not_touched(make_trainer: Make, root: Path) -> None:
    """P25: exports and other directories neither count as checkpoints nor are removed."""
    for name in (
        "export",
        "step-final",
        "step-00000001-hf",
        "checkpoint-3",
        "step-00000009.incomplete-mine",
        "step-7",
    ):
        (root / name).mkdir(parents=True)
        (root / name / "model.safetensors").touch()
    trainer = make_trainer(retention={"last": 1})
    for step in (1, 2, 3):
        trainer.save(step)
    trainer.writer.close()
    names = {
        "export",
        "step-final",
        "step-00000001-hf",
        "checkpoint-3",
        "step-00000009.incomplete-mine",
        "step-7",
    }
    assert set(os.listdir(root)) == names | {"step-00000003"}
    assert all((root / name / "model.safetensors").exists() for name in names)


def test_a_file_that_somebody_put_into_a_checkpoint_is_kept(make_trainer: Make, root: Path) -> None:
    """P25: an export inside a checkpoint survives its pruning."""
    trainer = make_trainer(retention={"last": 1})
    trainer.save(1)
    (root / "step-00000001/hf").mkdir()
    (root / "step-00000001/hf/model.safetensors").write_bytes(b"export")
    trainer.save(2)
    trainer.save(3)
    notes = [note for note in trainer.drain_notes() if "did not write" in note]
    kept = root / "step-00000001.pruned-0000000a-0002"
    assert (kept / "hf/model.safetensors").read_bytes() == b"export"
    assert sorted(os.listdir(kept)) == ["hf", "manifest.pruned.json"]
    assert len(notes) == 1


def test_a_link_to_a_checkpoint_elsewhere_is_not_followed(
    make_trainer: Make, root: Path, tmp_path: Path
) -> None:
    elsewhere = FakeTrainer(tmp_path / "elsewhere")
    elsewhere.save(1)
    elsewhere.writer.close()
    root.mkdir()
    (root / "step-00000001").symlink_to(tmp_path / "elsewhere/step-00000001")
    trainer = make_trainer(retention={"last": 1})
    trainer.save(2)
    trainer.save(3)
    trainer.writer.close()
    assert (root / "step-00000001").is_symlink()
    assert Catalog(tmp_path / "elsewhere").get(1).problems("full") == []


def test_dead_attempts_are_cleared_and_live_ones_are_not(make_trainer: Make, root: Path) -> None:
    dead = make_trainer(
        incarnation="0000000d", actions=(Action(point="commit.rename", kind="kill"),)
    )
    dead.submit(dead.begin(1), 1, content(1))
    dead.deaths.get(timeout=10)
    live = make_trainer(incarnation="0000000e")
    live.begin(2)
    wait_until(lambda: Catalog(root).find_live_attempts())
    assert {one.attempt: one.is_live for one in Catalog(root).incomplete()} == {
        "0000000d-0001": False,
        "0000000e-0001": True,
    }
    trainer = make_trainer()
    trainer.save(3)
    trainer.writer.close()
    assert leftovers(root) == ["step-00000002.incomplete-0000000e-0001"]
    assert os.listdir(root / ".attempts") == ["0000000e-0001"]
