"""Field cases of themes F, H and O, where they concern a whole recipe."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sft_runs import BASE, Alarm, Stop, final_state, make_inputs, records, run_sft, steps_by_attempt

from backstay import Catalog
from backstay.events import read_events, read_lines
from backstay.testing.tiny_llm import write_tiny_llm
from backstay.training.runtime import BAD_INPUT
from backstay.training.signals import STOPPED


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A model and twenty samples: five steps per epoch."""
    return {**make_inputs(tmp_path), "data.packing": "false", "epochs": 1}


def steps_in(out: Path) -> list[int]:
    return [entry.step for entry in Catalog(out / "checkpoints").list()]


def test_a_directory_without_checkpoints_gets_the_base_model(
    tmp_path: Path, values: dict[str, Any], capfd: Any
) -> None:
    """P26: the directory exists, so the base model is silently not loaded."""
    fresh, used = tmp_path / "fresh", tmp_path / "used"
    (used / "checkpoints").mkdir(parents=True)
    (used / "metrics.jsonl").write_text('{"step": 3')
    assert run_sft(fresh, values) == run_sft(used, values) == [0]
    assert final_state(used) == final_state(fresh)
    assert f"model: {values['model.path']}" in capfd.readouterr().out


def test_a_checkpoint_that_was_named_and_is_not_there_is_an_error(
    tmp_path: Path, values: dict[str, Any], capfd: Any
) -> None:
    """P26: an explicit but missing step was ignored."""
    assert run_sft(tmp_path / "out", values) == [0]
    missing = tmp_path / "out" / "checkpoints" / "step-00000007"
    assert run_sft(tmp_path / "new", {**values, "resume": missing}) == [BAD_INPUT]
    assert str(missing) in capfd.readouterr().out
    assert steps_in(tmp_path / "new") == []


def test_what_a_run_wrote_is_found_by_the_same_settings(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """P27: resume paths: adapter looked for beside the base, epoch directory doubled."""
    assert run_sft(tmp_path / "out", values, stop=Stop(4 * 2)) == [STOPPED]
    assert run_sft(tmp_path / "out", values) == [0]
    assert steps_by_attempt(tmp_path / "out") == [[1, 2], [3, 4, 5]]


def test_any_checkpoint_can_be_named(tmp_path: Path, values: dict[str, Any]) -> None:
    """P27: a user may also name any checkpoint directory, or the root of another run."""
    assert run_sft(tmp_path / "out", {**values, "checkpoint.keep_last": "null"}) == [0]
    root = tmp_path / "out" / "checkpoints"
    for number, (place, first) in enumerate([(root / "step-00000002", 3), (root, None)]):
        out = tmp_path / f"new-{number}"
        assert run_sft(out, {**values, "resume": place}) == [0]
        assert (min(records(out)) if first else records(out)) == (first or {})
        if first:
            assert final_state(out) == final_state(tmp_path / "out")


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_root_with_nothing_usable_is_refused(
    mode: str, tmp_path: Path, values: dict[str, Any], capfd: Any
) -> None:
    """P28: auto resume found nothing, started at 0 and overwrote the run."""
    values = {**values, "checkpoint.mode": mode}
    assert run_sft(tmp_path / "out", values, stop=Stop(4 * 3)) == [STOPPED]
    for file in (tmp_path / "out" / "checkpoints").glob("step-*/weights/*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    assert run_sft(tmp_path / "out", values) == [BAD_INPUT]
    assert "none that is whole" in capfd.readouterr().out
    assert steps_by_attempt(tmp_path / "out") == [[1, 2, 3]]


@pytest.mark.parametrize(("interval", "expected"), [(3, [3, 5]), (5, [5]), (100, [5])])
def test_the_last_step_is_saved_once(
    interval: int, expected: list[int], tmp_path: Path, values: dict[str, Any], capfd: Any
) -> None:
    """P29: no final checkpoint, or two of them."""
    out = tmp_path / "out"
    values = {**values, "checkpoint.every_steps": interval}
    assert run_sft(out, values) == [0]
    assert steps_in(out) == expected
    assert [event.step for event in read_events(out / "checkpoints")] == expected
    assert run_sft(out, values) == [0]
    assert "nothing left to train" in capfd.readouterr().out
    assert [event.step for event in read_events(out / "checkpoints")] == expected
    assert steps_by_attempt(out) == [[1, 2, 3, 4, 5]]


def test_each_interruption_goes_on_from_the_last_save(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """P30: second interruption resumes at the step of the first."""
    values = {**values, "epochs": 3, "checkpoint.every_steps": 1}
    assert run_sft(tmp_path / "untouched", values) == [0]
    out = tmp_path / "out"
    for _ in range(2):
        ends = run_sft(out, values, stop=Stop(4 * 5 + 1, number=signal.SIGKILL))
        assert ends == ["killed by signal 9"]
    assert run_sft(out, values) == [0]
    assert [steps[0] for steps in steps_by_attempt(out)] == [1, 6, 11]
    assert records(out) == records(tmp_path / "untouched")
    assert final_state(out) == final_state(tmp_path / "untouched")


CASES = {
    # P38: resume at an epoch boundary skips the next epoch and exits 0.
    "P38": ({"num_sequences": 8}, {"batch_size": 2, "epochs": 3}, [3, 4, 5], 12),
    "P38-workers": (
        {"num_sequences": 8},
        {"batch_size": 2, "epochs": 3, "data.num_workers": 2},
        [3, 4, 5],
        12,
    ),
    # P39: skip count ignores gradient accumulation; windows cross the epochs, and the last one is not full.
    "P39": ({"num_sequences": 10}, {"batch_size": 4, "epochs": 3}, range(1, 8), 8),
    # P45: streaming data: position lost after the first pass, one packed sample vanishes.
    "P45": (
        {"num_sequences": 7, "is_packed": True},
        {"batch_size": 2, "epochs": 3, "data.packing": "true"},
        [1, 3, 4, 7, 8],
        11,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_step_is_resumed_the_rest_is_the_same(case: str, tmp_path: Path) -> None:
    """P38, P39, P45: the data position at epoch boundaries, across accumulation windows, and with packing."""
    inputs, changes, steps, num_steps = CASES[case]
    values = {**make_inputs(tmp_path, **inputs), "data.packing": "false", **changes}
    values |= {"checkpoint.every_steps": 1, "checkpoint.keep_last": "null"}
    reference = tmp_path / "untouched"
    assert run_sft(reference, values) == [0]
    expected = records(reference)
    assert max(expected) == num_steps
    taken = sorted(sample for record in expected.values() for sample in record["samples"])
    assert taken == sorted([*range(inputs["num_sequences"])] * 3)
    for step in steps:
        out = tmp_path / f"from-{step}"
        source = reference / "checkpoints" / f"step-{step:08}"
        assert run_sft(out, {**values, "resume": source}) == [0]
        assert records(out) == {each: expected[each] for each in expected if each > step}
        assert final_state(out) == final_state(reference)


def test_a_checkpoint_holds_the_state_after_the_step_in_its_name(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """P44: epoch number off by one at the boundary."""
    values = {**values, "epochs": 2, "batch_size": 10, "checkpoint.every_steps": 1}
    assert run_sft(tmp_path / "out", {**values, "checkpoint.keep_last": "null"}) == [0]
    by_step = records(tmp_path / "out")
    for step in (1, 2, 3, 4):
        folder = tmp_path / "out" / "checkpoints" / f"step-{step:08}"
        assert json.loads((folder / "manifest.json").read_text())["step"] == step
        state = json.loads((folder / "state.json").read_text())
        assert state["parts"]["sampler"]["position"] == 10 * step
        assert by_step[step]["epoch"] == step / 2


def program(out: Path, values: dict[str, Any]) -> list[str]:
    overrides = [f"{key}={value}" for key, value in {**BASE, **values, "out": out}.items()]
    return [sys.executable, "-m", "backstay.recipes.sft", *overrides]


def test_a_signal_to_the_whole_process_group_ends_in_a_save(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """P72: SIGTERM kills the data workers first."""
    out = tmp_path / "out"
    values = {**values, "data.num_workers": 2, "epochs": 200}
    process = subprocess.Popen(program(out, values), start_new_session=True)
    while max(records(out), default=0) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == STOPPED
    assert steps_in(out)[-1] == max(records(out))


@pytest.mark.parametrize("ending", ["finished", "raised"])
def test_the_process_ends_after_its_last_save_is_on_disk(
    ending: str, tmp_path: Path, values: dict[str, Any]
) -> None:
    """P73: the process ends before the last save is on disk."""
    out = tmp_path / "out"
    write_tiny_llm(tmp_path / "model", hidden_size=512)  # several chunks, for the cap to act on
    values = {**values, "checkpoint.bandwidth_bytes_per_s": 20_000_000, "checkpoint.every_steps": 1}
    if ending == "finished":
        assert run_sft(out, {**values, "max_steps": 1}) == [0]
    else:
        values |= {"optimizer.lr": 1e30, "optimizer.warmup_steps": 0, "optimizer.clip_norm": 0}
        done = subprocess.run(program(out, values), capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "the update was not made" in done.stderr
    (event,) = read_events(out / "checkpoints")
    assert event.outcome == "committed"
    assert event.written_s > 1
    assert steps_in(out) == [1]
    assert [line["step"] for line in read_lines(out / "metrics.jsonl")] == [1]


def test_a_second_signal_while_saving_changes_nothing(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """P71: a second signal does not corrupt the save."""
    out = tmp_path / "out"
    values = {**values, "checkpoint.bandwidth_bytes_per_s": 300_000}
    alarm = Alarm(0, signal.SIGTERM, 0, after_step=1, repeat=5)
    assert run_sft(out, {**values, "epochs": 100}, alarm=alarm) == [STOPPED]
    latest = Catalog(out / "checkpoints").latest()
    assert latest is not None
    assert latest.problems("full") == []
    assert latest.step == max(records(out))


def test_a_run_from_elsewhere_that_never_saved_starts_there_again(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    """P26, P28: what a killed first save left behind is no checkpoint, and does not hide the one that was named."""
    assert run_sft(tmp_path / "old", {**values, "max_steps": 2}) == [0]
    source = tmp_path / "old" / "checkpoints"
    left_over = tmp_path / "new" / "checkpoints" / "step-00000004.incomplete-0-0001"
    left_over.mkdir(parents=True)
    assert run_sft(tmp_path / "new", {**values, "resume": source}) == [0]
    assert steps_by_attempt(tmp_path / "new") == [[3, 4, 5]]
