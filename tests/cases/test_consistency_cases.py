"""Field cases of themes B and C: what a checkpoint holds, and how a failed save is told."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loops import seed_all, train_state
from torch import nn

from backstay import Catalog, Checkpointer, TrainState, restore
from backstay.errors import BackstayError, SaveFailed, WriterDied
from backstay.testing import Gate, fail_at, inject, run_ranks, slow_at
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.models import make_training, train_step


class Rebinding(nn.Module):
    """A statistic that is replaced at each step instead of updated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))

    def step(self) -> None:
        self.count = self.count + 1


def test_values_changed_right_after_the_call_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    """P07: weights updated right after the call land in the checkpoint."""
    training = make_training()
    train_step(training)
    counter = {"n": 5}
    state = train_state(training, counter=counter)
    expected = state_bytes(training.model, training.optimizers)
    with (
        inject(slow_at("writer.received", 0.3)),
        Checkpointer(tmp_path, state, staging="block") as checkpointer,
    ):
        checkpointer.save(1)
        scribble(training)
        counter["n"] = 9
    other = make_training(seed=3)
    state = train_state(other, counter={"n": 0})
    restore(tmp_path, state)
    assert_bit_equal(expected, state_bytes(other.model, other.optimizers))
    assert state.extra["counter"] == {"n": 5}


def scribble(training: object) -> None:
    """Fill every parameter, buffer and moment with other values."""
    with torch.no_grad():
        for tensor in training.model.state_dict().values():  # type: ignore[attr-defined]
            tensor.fill_(7)
        for optimizer in training.optimizers:  # type: ignore[attr-defined]
            for values in optimizer.state.values():
                for value in values.values():
                    value.fill_(7)


def test_overlapped_staging_refuses_values_changed_outside_of_a_step(tmp_path: Path) -> None:
    """P07: under "overlap" the copy is still running; a change that no fence can hold back fails the save."""
    training = make_training()
    train_step(training)
    with (
        inject(slow_at("save.stage", 0.2)),
        Checkpointer(tmp_path, train_state(training)) as checkpointer,
    ):
        checkpointer.save(1)
        scribble(training)
        with pytest.raises(SaveFailed, match="changed while it was being copied"):
            checkpointer.wait()
    assert Catalog(tmp_path).latest() is None


def test_the_optimizer_waits_for_the_copy(tmp_path: Path) -> None:
    """P07: steps that follow a save at once change nothing in it, however slow the copy is."""
    training = make_training()
    train_step(training)
    expected = state_bytes(training.model, training.optimizers)
    buffer = "running_mean"
    with (
        inject(slow_at("save.stage", 1.0)),
        Checkpointer(tmp_path, train_state(training)) as checkpointer,
    ):
        checkpointer.save(1)
        train_step(training)
        train_step(training)
    assert checkpointer.events[0].blocked_s > 0.1
    other = make_training(seed=3)
    restore(tmp_path, train_state(other))
    assert_bit_equal(expected, state_bytes(other.model, other.optimizers))
    assert expected[buffer] != state_bytes(training.model)[buffer]


@pytest.mark.parametrize("staging", ["overlap", "block"])
def test_a_buffer_that_is_replaced_is_saved_as_it_is_now(tmp_path: Path, staging: str) -> None:
    """P08: buffer replaced instead of updated: the checkpoint keeps the first value."""
    model = Rebinding()
    with Checkpointer(tmp_path, TrainState(model=model), staging=staging) as checkpointer:  # type: ignore[arg-type]
        for step in range(1, 4):
            model.step()
            checkpointer.save(step)
    for step in range(1, 4):
        restore(tmp_path, TrainState(model=model), step=step)
        assert model.count.item() == step


def test_a_load_of_the_step_in_flight_waits_for_it(tmp_path: Path) -> None:
    """P10: load called while the save of the same step is still running."""
    model = nn.Linear(2, 2)
    with (
        inject(slow_at("commit.manifest", 0.3)),
        Checkpointer(tmp_path, TrainState(model=model), staging="block") as checkpointer,
    ):
        expected = state_bytes(model)
        for step in (5, 6):
            pending = checkpointer.save(step)
            nn.init.zeros_(model.weight)
            assert not pending.committed.done()
            assert checkpointer.restore(step if step == 5 else None) == step
            assert_bit_equal(expected, state_bytes(model))


@pytest.mark.parametrize(
    "point", ["write.create", "write.first_chunk", "write.last_chunk", "write.fsync"]
)
def test_a_write_error_on_one_rank_fails_the_save_on_all(tmp_path: Path, point: str) -> None:
    """P11, P13: a failing writer is ignored; only the failing rank raises. Then the next save is good."""
    assert run_ranks(2, save_with_error, tmp_path, point, timeout_s=30) == [True, True]


def save_with_error(rank: int, world_size: int, root: Path, point: str) -> bool:
    training = make_training("fsdp2")
    per_save = (
        2 + 2
    )  # files of rank 1: its generators, trained and frozen parameters; frozen ones only once
    nth = {"write.create": per_save, "write.first_chunk": per_save}.get(point, per_save)
    with (
        inject(fail_at(point, "ENOSPC", rank=1, nth=nth)),
        Checkpointer(root, train_state(training)) as checkpointer,
    ):
        train_step(training)
        checkpointer.save(1)
        checkpointer.wait()
        train_step(training)
        checkpointer.save(2)
        with pytest.raises(SaveFailed, match=r"step 2 .*rank 1: .*ENOSPC"):
            checkpointer.wait()
        dist.barrier()
        entry = Catalog(root).latest()
        assert entry is not None
        assert entry.step == 1
        checkpointer.save(3)
        checkpointer.wait()
    steps = [entry.step for entry in Catalog(root).list()]
    return steps == [1, 3] and Catalog(root).incomplete() == []


def test_a_failure_is_raised_once_by_the_next_save(tmp_path: Path) -> None:
    """P13: the slot is cleared, so that a later save can succeed."""
    assert run_ranks(2, fail_then_save, tmp_path, timeout_s=30) == [True, True]


def fail_then_save(rank: int, world_size: int, root: Path) -> bool:
    training = make_training("fsdp2")
    train_step(training)
    with (
        inject(fail_at("write.done_record", "EIO", rank=1)),
        Checkpointer(root, train_state(training)) as checkpointer,
    ):
        checkpointer.save(1)
        with pytest.raises(SaveFailed, match="rank 1"):
            checkpointer.save(2)
        checkpointer.save(3)
        checkpointer.wait()
    return [entry.step for entry in Catalog(root).list()] == [3]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_writer_fails_the_save_and_is_replaced(tmp_path: Path, victim: int) -> None:
    """P13: a dead writer is told on all ranks within seconds."""
    assert run_ranks(2, lose_a_writer, tmp_path, victim, timeout_s=30) == [True, True]


def lose_a_writer(rank: int, world_size: int, root: Path, victim: int) -> bool:
    training = make_training("fsdp2")
    train_step(training)
    gate = Gate(root / "gate", "write.last_chunk", rank=victim)
    with inject(gate.action), Checkpointer(root, train_state(training)) as checkpointer:
        checkpointer.save(1)
        if rank == victim:
            gate.wait_reached()
            os.kill(writer_of(os.getpid()), signal.SIGKILL)
            gate.open()
        with pytest.raises(WriterDied, match=rf"rank {victim} \(pid \d+\)"):
            checkpointer.wait()
        assert Catalog(root).latest() is None
        train_step(training)
        checkpointer.save(2)
    return [entry.step for entry in Catalog(root).list()] == [2]


def writer_of(trainer: int) -> int:
    """The only child of a trainer."""
    (pid,) = Path(f"/proc/{trainer}/task/{trainer}/children").read_text().split()
    return int(pid)


SCRIPT = """
import sys, torch
from backstay import Checkpointer, TrainState
from backstay.testing import fail_at, inject
mode, root = sys.argv[1:]
with inject(fail_at("commit.rename", "EACCES")):
    checkpointer = Checkpointer(root, TrainState(model=torch.nn.Linear(2, 2)))
if mode == "falls off":
    checkpointer.save(1)
elif mode == "block":
    with checkpointer:
        checkpointer.save(1)
elif mode == "exit":
    with checkpointer:
        checkpointer.save(1)
        sys.exit(0)
elif mode == "exit outside":
    checkpointer.save(1)
    sys.exit(0)
elif mode == "raises":
    with checkpointer:
        checkpointer.save(1)
        raise KeyError("what really went wrong")
"""


@pytest.mark.parametrize("mode", ["falls off", "block", "exit", "exit outside", "raises"])
def test_a_process_whose_last_save_failed_does_not_exit_with_zero(
    tmp_path: Path, mode: str
) -> None:
    """P12: the last save fails, nobody waits for it, the job exits 0."""
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode != 0
    assert "EACCES" in found.stderr
    if mode == "raises":
        assert found.stderr.rstrip().endswith("KeyError: 'what really went wrong'")


@pytest.mark.parametrize("mode", ["raise", "warn"])
def test_a_failing_state_dict_on_one_rank_is_raised_on_all(tmp_path: Path, mode: str) -> None:
    """P13: a state that cannot be built on rank 1 reaches rank 0 with rank and cause; the next save works."""
    assert run_ranks(2, fail_to_collect, tmp_path, mode, timeout_s=30) == [True, True]


class Moody:
    """A sampler one of whose methods fails when told to."""

    broken = ""

    def state_dict(self) -> dict[str, int]:
        self.answer("state_dict")
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.answer("load_state_dict")

    def answer(self, method: str) -> None:
        if self.broken == method:
            raise ZeroDivisionError("moody today")


def fail_to_collect(rank: int, world_size: int, root: Path, mode: str) -> bool:
    seed_all(rank)
    sampler = Moody()
    state = TrainState(model=nn.Linear(1, 1), sampler=sampler)
    with Checkpointer(root, state, on_failure=mode) as checkpointer:  # type: ignore[arg-type]
        sampler.broken = "state_dict" if rank == 1 else ""
        with pytest.raises(BackstayError, match="rank 1: ZeroDivisionError: moody today"):
            checkpointer.save(1)
        sampler.broken = ""
        checkpointer.save(1)
        for method in ("state_dict", "load_state_dict"):
            sampler.broken = method if rank == 1 else ""
            with pytest.raises(BackstayError, match="rank 1: ZeroDivisionError: moody today"):
                checkpointer.restore()
        sampler.broken = ""
        assert checkpointer.restore() == 1
    return [entry.step for entry in Catalog(root).list()] == [1]
