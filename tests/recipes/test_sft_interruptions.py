"""Whatever ends a run, and whenever: the same command again ends with the weights of the run that nobody touched."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sft_runs import BASE, Alarm, final_state, make_inputs, records, run_sft

from backstay import Catalog
from backstay.events import read_lines
from backstay.recipes import sft
from backstay.testing.ranks import run_ranks
from backstay.training.course import Course
from backstay.training.program import run_method
from backstay.training.signals import STOPPED

NUM_STEPS = 40
NUM_KILLS = int(os.environ.get("BACKSTAY_TEST_KILLS", "20"))
ENDS = (signal.SIGKILL, signal.SIGTERM)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    """A run of 40 steps that nobody stopped, and the values that it ran with."""
    home = tmp_path_factory.mktemp("untouched")
    values = {**make_inputs(home), "data.packing": "false", "epochs": 8}
    assert run_sft(home / "out", values, ranks=2) == [0, 0]
    assert max(records(home / "out")) == NUM_STEPS
    return home / "out", values


def test_kills_at_random_moments_change_nothing(
    untouched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    reference, values = untouched
    seed = random.randrange(10**6)
    print(f"seed {seed}")  # shown if the test fails
    draw = random.Random(seed)
    num_kills = 0
    while num_kills < NUM_KILLS:
        out = tmp_path / f"run-{num_kills}"
        is_done = False
        while not is_done:
            alarm = None
            if num_kills < NUM_KILLS:
                alarm = Alarm(draw.uniform(0.0, 1.5), draw.choice(ENDS), draw.randrange(2))
            ends = run_sft(out, values, ranks=2, alarm=alarm)
            is_done = ends == [0, 0]
            num_kills += not is_done
        assert final_state(out) == final_state(reference)
        assert records(out) == records(reference)


def test_a_step_that_was_saved_was_logged(
    untouched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, values = untouched
    out = tmp_path / "out"
    overrides = [f"{key}={value}" for key, value in {**BASE, **values, "out": out}.items()]
    assert run_ranks(1, dying_rank, overrides, timeout_s=60.0, allow_death=[0]) == [
        "killed by signal 9"
    ]
    assert max(entry.step for entry in Catalog(out / "checkpoints").list()) == 4
    assert max(records(out)) == 4
    assert run_sft(out, {**values, "max_steps": 6}) == [0]
    assert sorted(records(out)) == [*range(1, 7)]


def dying_rank(_: int, __: int, overrides: list[str]) -> int:
    """One rank that dies as soon as step 4 is committed."""
    real = Course.save_if_due

    def save_and_die(course: Course, scores: dict[str, float]) -> None:
        real(course, scores)
        if course.step == 4:
            course.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    Course.save_if_due = save_and_die  # type: ignore[method-assign]
    return run_method(sft.METHOD, overrides)


def start(out: Path, values: dict[str, Any]) -> subprocess.Popen[bytes]:
    """The real command, with a launcher and two ranks."""
    overrides = [f"{key}={value}" for key, value in {**BASE, **values, "out": out}.items()]
    command = [sys.executable, "-m", "backstay.cli", "train", "sft", "--nproc", "2", *overrides]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for(what: Callable[[], Any], limit_s: float) -> Any:
    """Poll until something is true."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing within {limit_s} s")


def rank_pids(out: Path) -> dict[int, int]:
    """Rank -> process id, of all ranks that work for an output directory."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"backstay.recipes.sft" in command and f"out={out}".encode() in command:
            ranks = [int(each[5:]) for each in environment if each.startswith(b"RANK=")]
            found.update(dict.fromkeys(ranks, int(folder.name)))
    return found


def steps_done(out: Path) -> int:
    return max((line["step"] for line in read_lines(out / "metrics.jsonl")), default=0)


@pytest.mark.parametrize(
    ("target", "numbers", "expected"),
    [
        ("launcher", [signal.SIGTERM], STOPPED),
        ("launcher", [signal.SIGTERM, signal.SIGTERM], STOPPED),
        ("launcher", [signal.SIGKILL], -signal.SIGKILL),
        ("rank 1", [signal.SIGTERM], STOPPED),
        ("rank 0", [signal.SIGKILL], 1),
    ],
    ids=lambda value: "+".join(each.name for each in value) if isinstance(value, list) else None,
)
def test_p71_whoever_gets_the_signal_all_end_and_the_next_start_goes_on(
    target: str,
    numbers: list[int],
    expected: int,
    untouched: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    reference, values = untouched
    out = tmp_path / "out"
    launcher = start(out, values)
    wait_for(lambda: steps_done(out) >= 7, 60)
    pids = rank_pids(out)
    victim = launcher.pid if target == "launcher" else pids[int(target[-1])]
    for number in numbers:
        os.kill(victim, number)
    assert launcher.wait(30) == expected
    wait_for(lambda: not rank_pids(out), 30)
    if signal.SIGKILL not in numbers or target == "launcher":
        # They were asked, so they saved: nothing that was logged is lost.
        latest = Catalog(out / "checkpoints").latest()
        assert latest is not None
        assert latest.step == steps_done(out)

    assert run_sft(out, values, ranks=2) == [0, 0]
    assert final_state(out) == final_state(reference)
    assert records(out) == records(reference)


def test_sigusr1_saves_and_training_goes_on(
    untouched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    reference, values = untouched
    out = tmp_path / "out"
    few = {**values, "checkpoint.every_steps": 1000, "checkpoint.keep_last": "null"}
    alarm = Alarm(0.6, signal.SIGUSR1, 1, after_step=5)
    assert run_sft(out, few, ranks=2, alarm=alarm) == [0, 0]
    steps = [entry.step for entry in Catalog(out / "checkpoints").list()]
    assert len(steps) == 2
    assert steps[-1] == NUM_STEPS
    assert final_state(out) == final_state(reference)
