"""Signals agreed upon, one run per directory, metrics that are only added to."""

import json
import logging
import os
import pty
import random
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from backstay.coordination import Coordination
from backstay.errors import ConfigError, DataError, InvalidArgument, UsedRoot
from backstay.testing.ranks import run_ranks
from backstay.training.metrics import LogConfig, Metrics
from backstay.training.runtime import Runtime, reseed, take_directory
from backstay.training.signals import StopSignals, Wish


def wishes(rank: int, world_size: int) -> list[Wish]:
    ranks, found = Coordination(timeout_s=20), []
    with StopSignals() as signals:
        found.append(signals.agree(ranks))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        found.append(signals.agree(ranks))
        found.append(signals.agree(ranks))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        found.append(signals.agree(ranks))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return found


def test_a_signal_to_one_rank_is_a_wish_on_all() -> None:
    """P71: one rank gets the signal, the rest hang."""
    expected = [Wish(), Wish(save=True), Wish(), Wish(stop=True)]
    assert run_ranks(2, wishes) == [expected, expected]


HOLD = """
import os, sys, time
from pathlib import Path
from backstay.training.runtime import take_directory
lock = take_directory(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(60)
print("held", flush=True)
time.sleep(60)
"""


def test_one_run_at_a_time_works_in_a_directory_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UsedRoot, match=f"process {holder.pid} on "):
            take_directory(tmp_path, wait_s=0.2)
        # The child that it forked lives on, as a loader worker may for some seconds.
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        take_directory(tmp_path, wait_s=5).close()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()


class Signpost(logging.Handler):
    """Makes a file of each message that it gets, for another process to see."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        self.file.write_text(record.getMessage())


def take_in_turn(rank: int, _: int, out: Path, note: Path) -> str:
    if rank == 0:
        lock = take_directory(out)
        dist.barrier()
        while not note.exists():  # the other one waits
            time.sleep(0.01)
    else:
        logging.getLogger("backstay").addHandler(Signpost(note))
        dist.barrier()
        lock = take_directory(out, wait_s=30)
    lock.close()
    return (out / ".lock").read_text()


def test_a_second_run_waits_for_the_end_of_the_first_and_says_so(tmp_path: Path) -> None:
    first, second = run_ranks(2, take_in_turn, tmp_path / "out", tmp_path / "note")
    assert f"waiting for another run to end ({first})" in (tmp_path / "note").read_text()
    assert second != first


def together(rank: int, _: int) -> list[object]:
    run = Runtime(torch.device("cpu"), Coordination(timeout_s=20))
    found: list[object] = [run.together(lambda: rank), run.together(lambda: 7, on_first_only=True)]
    for guilty in (0, 1):
        try:
            run.together(lambda guilty=guilty: complain(rank, guilty))
        except DataError as error:
            found.append(str(error))
    return found


def complain(rank: int, guilty: int) -> None:
    if rank == guilty:
        raise DataError("line 3")


def test_what_goes_wrong_on_one_rank_is_raised_on_all() -> None:
    first, second = run_ranks(2, together)
    assert (first[:2], second[:2]) == ([0, 7], [1, None])
    assert first[2:] == second[2:] == ["rank 0: line 3", "rank 1: line 3"]


def draws(*keys: int) -> tuple[float, float, float]:
    reseed(*keys)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_all_generators_follow_from_seed_step_and_rank() -> None:
    assert draws(0, 5, 1) == draws(0, 5, 1)
    others = [draws(*keys) for keys in ((0, 5, 1), (1, 5, 1), (0, 6, 1), (0, 5, 0), (0, 51))]
    for column in zip(*others, strict=True):
        assert len({*column}) == 5


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="cannot be written"):
        take_directory(tmp_path / "file" / "out")


def test_metrics_are_only_added_and_count_the_starts(tmp_path: Path) -> None:
    for _ in range(2):
        metrics = Metrics(tmp_path, LogConfig(every_steps=2), is_active=True)
        for step in (1, 2):
            metrics.write(step, {"loss": 0.5, "eval_loss": None, "samples": [1, 2]})
        metrics.close()
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "at')  # a crash
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    expected = {"step": 2, "attempt": 2, "loss": 0.5, "samples": [1, 2]}
    assert json.loads(lines[2]) == expected
    assert len(lines) == 4


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, LogConfig(), is_active=False)
    metrics.write(1, {"loss": 0.5})
    assert list(tmp_path.iterdir()) == []


SHOW = """
import sys
from pathlib import Path
from backstay.training.metrics import LogConfig, Metrics
metrics = Metrics(Path(sys.argv[1]), LogConfig(), is_active=True)
metrics.begin(0, 4)
for step in (1, 2, 3, 4):
    metrics.write(step, {"loss": 0.5})
metrics.close()
"""


def test_a_terminal_shows_a_bar_and_a_file_gets_plain_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHOW]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    plain = subprocess.Popen(
        [*command, str(tmp_path / "a")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    subprocess.run([*command, str(tmp_path / "b")], stdout=theirs, stderr=theirs, check=True)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # what a terminal says when nobody is at its other end any more
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert b"4/4" in shown
    assert b"step 1:" not in shown
    output, errors = plain.communicate(timeout=60)
    assert output.splitlines()[0] == "step 1: loss 0.5"
    assert errors == ""


@pytest.mark.skipif(find_spec("wandb") is not None, reason="it is installed")
def test_a_receiver_of_metrics_that_is_not_installed_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wandb is not installed; pip install wandb"):
        Metrics(tmp_path, LogConfig(wandb_project="x"), is_active=True)


def test_numbers_go_to_tensorboard_if_it_is_installed(tmp_path: Path) -> None:
    config = LogConfig(tensorboard=True)
    if find_spec("tensorboard") is None:
        with pytest.raises(ConfigError, match="tensorboard is not installed"):
            Metrics(tmp_path, config, is_active=True)
        return
    metrics = Metrics(tmp_path, config, is_active=True)
    metrics.write(1, {"loss": 0.5, "samples": [1, 2]})
    metrics.close()
    (events,) = (tmp_path / "tensorboard").glob("events.*")
    assert b"loss" in events.read_bytes()
    assert b"samples" not in events.read_bytes()
