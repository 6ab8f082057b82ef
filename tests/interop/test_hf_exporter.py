"""Exports in the background: equal to those of the live model, harmless to training, and loud when they fail."""

import logging
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_exports import (
    TOKENS,
    assert_loads_as,
    content,
    save_checkpoint,
    tiny_model,
)

from backstay import Checkpointer, RetentionPolicy, SaveEvent, TrainState
from backstay.coordination import Coordination
from backstay.errors import CheckpointNotFound, ExportFailed
from backstay.interop.hf import Exporter, ExportOptions, export_model, save_companions
from backstay.interop.hf_source import Source
from backstay.testing import run_ranks

LIMIT_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def names(folder: Path) -> set[str]:
    return {*os.listdir(folder)} if folder.exists() else set()


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_exports_during_training_equal_those_of_the_live_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = ExportOptions(dtype="bfloat16", max_shard_bytes=30_000)
    companions = save_companions(tmp_path / "companions", config=model.config)
    exporter = Exporter(tmp_path / "export", companions=companions, options=options)
    checkpoints = tmp_path / "checkpoints"
    steps = [1, 2]

    def on_event(event: SaveEvent) -> None:
        exporter.start(checkpoints / f"step-{event.step:08d}", event.step)

    with Checkpointer(
        checkpoints,
        TrainState(model=model, optimizer=optimizer),
        keep=RetentionPolicy(last=1),
        on_event=on_event,
    ) as checkpointer:
        for step in steps:
            train_step(model, optimizer)
            checkpointer.save(step)
            export_model(
                model,
                tmp_path / f"live/step-{step:08d}",
                companions=companions,
                options=options,
                ranks=Coordination(timeout_s=10),
            )
    assert names(checkpoints) >= {"step-00000002"}
    assert "step-00000001" not in names(checkpoints)
    with pytest.raises(ExportFailed, match=r"step 1, 2: not exported after 0\.01 s; it goes on"):
        exporter.wait(0.01)
    with caplog.at_level(logging.INFO, "backstay"):
        exporter.wait()
    assert names(tmp_path / "export") == {"step-00000001", "step-00000002"}
    for step in steps:
        path = f"step-{step:08d}"
        assert content(tmp_path / "export" / path) == content(tmp_path / "live" / path)
    assert [text for text in caplog.messages if "exported step" in text] != []


def test_an_event_is_delivered_before_the_next_save_could_prune_its_checkpoint(
    tmp_path: Path,
) -> None:
    """What `Exporter.start` relies on, with a callback that takes its time."""
    model = tiny_model()
    found = []

    def on_event(event: SaveEvent) -> None:
        threading.Event().wait(0.05)
        source = Source(tmp_path / "export", tmp_path / f"c/step-{event.step:08d}", event.step)
        found.append((event.step, len(content(source.checkpoint))))
        source.discard()

    state = TrainState(model=model)
    keep = RetentionPolicy(last=1)
    with Checkpointer(tmp_path / "c", state, keep=keep, on_event=on_event) as checkpointer:
        for step in range(1, 8):
            checkpointer.save(step)
    assert [step for step, _ in found] == [*range(1, 8)]
    assert {num_files for _, num_files in found} == {found[0][1]}
    assert names(tmp_path / "export") == set()


def test_what_fails_in_the_background_is_raised_once_by_wait_with_step_and_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save_checkpoint(tiny_model(), tmp_path / "run")
    exporter = Exporter(tmp_path / "export", companions=tmp_path / "nowhere")
    exporter.start(checkpoint, 1)
    exporter.start(tmp_path / "run/checkpoints/step-00000009", 9)
    with pytest.raises(ExportFailed) as caught:
        exporter.wait()
    assert "the export of step 1 failed: exited with status 1: ModelError" in str(caught.value)
    assert "nowhere/config.json is missing" in str(caught.value)
    assert "the export of step 9 failed: CheckpointNotFound" in str(caught.value)
    assert len([text for text in caplog.messages if "failed" in text]) == 2
    assert names(tmp_path / "export") == set()
    exporter.wait()


def export_onto_a_full_disk(rank: int, world_size: int, folder: Path) -> str:
    checkpoint = save_checkpoint(tiny_model(), folder / "run")
    exporter = Exporter(folder / "export", companions=folder / "run/companions")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    exporter.start(checkpoint, 1)
    try:
        exporter.wait()
    except ExportFailed as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    return ""


def test_a_full_disk_fails_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    (found,) = run_ranks(1, export_onto_a_full_disk, tmp_path, distributed=False)
    assert "step 1 failed" in found
    assert "File too large" in found
    assert names(tmp_path / "export") == set()


def test_a_killed_export_is_invisible_and_the_next_start_removes_what_it_left(
    tmp_path: Path,
) -> None:
    model = tiny_model(vocab_size=50_000, hidden_size=256)
    checkpoint = save_checkpoint(model, tmp_path / "run")
    out = tmp_path / "export"
    exporter = Exporter(out, companions=tmp_path / "run/companions")
    (out / "step_notes.incomplete-00000000").mkdir(parents=True)
    exporter.start(checkpoint, 1)
    until(lambda: any(name.startswith("step-00000001.incomplete-") for name in names(out)))
    os.kill(exporter.pid, signal.SIGKILL)
    with pytest.raises(ExportFailed, match="step 1 failed: killed by signal 9"):
        exporter.wait()
    left = names(out)
    assert "step-00000001" not in left
    assert any(name.startswith("step-00000001.incomplete-") for name in left)
    impatient = Exporter(out, companions=tmp_path / "run/companions", timeout_s=0.01)
    impatient.start(checkpoint, 1)
    with pytest.raises(ExportFailed, match=r"not done after 0\.01 s, so it was killed"):
        impatient.wait()
    # What nobody of ours made stays.
    assert names(out) == {"step_notes.incomplete-00000000"}


def start_and_die(rank: int, world_size: int, folder: Path) -> None:
    exporter = Exporter(folder / "export", companions=folder / "run/companions")
    exporter.start(folder / "run/checkpoints/step-00000001", 1)
    exporter.start(folder / "run/checkpoints/step-00000001", 2)
    until(lambda: exporter.pid > 0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_export_outlives_its_trainer_and_tidies_up(tmp_path: Path) -> None:
    model = tiny_model()
    save_checkpoint(model, tmp_path / "run")
    run_ranks(1, start_and_die, tmp_path, distributed=False, allow_death=[0])
    out = tmp_path / "export"
    until(lambda: "step-00000001" in names(out))
    until(lambda: not any("step-00000001." in name for name in names(out)))
    assert_loads_as(model, out / "step-00000001")
    # What waited in the dead trainer's queue is left over: nobody will export it.
    assert any("step-00000002.source" in name for name in names(out))
    exporter = Exporter(out, companions=tmp_path / "run/companions", timeout_s=0.01)
    exporter.start(tmp_path / "run/checkpoints/step-00000001", 3)
    with pytest.raises(ExportFailed):
        exporter.wait()
    assert names(out) == {"step-00000001"}


def test_linked_files_outlive_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tiny_model(), tmp_path / "run")
    expected = content(checkpoint)
    source = Source(tmp_path / "export", checkpoint, 1)
    shutil.rmtree(checkpoint)
    assert content(source.checkpoint) == expected
    source.discard()
    assert names(tmp_path / "export") == set()


def test_without_links_the_checkpoint_itself_is_read_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = save_checkpoint(tiny_model(), tmp_path / "run")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if Path(folder).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is one file system only")
        source = Source(Path(folder) / "export", checkpoint, 1)
        assert source.checkpoint == checkpoint
        source.discard()
        assert names(Path(folder) / "export") == set()
    assert "cannot be linked" in caplog.text


def test_a_pruned_checkpoint_cannot_be_linked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="was pruned"):
        Source(tmp_path / "export", tmp_path / "step-00000001", 1)
    assert names(tmp_path / "export") == set()
