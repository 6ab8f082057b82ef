"""The systems that `benchmarks.save` compares, as a rank runs them: each set up, then saving step by step under one stopwatch."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from backstay.checkpointer import Checkpointer
from backstay.state import TrainState
from benchmarks import common, limits, memory, trainings
from benchmarks.trainings import Training

OVERLAP, BLOCK = "backstay, overlap", "backstay, block"
STOCK = (
    "dcp.save",
    "dcp.async_save, thread",
    "dcp.async_save, process",
    "dcp.async_save, process, shared stager",
)
SYSTEMS = (OVERLAP, BLOCK, *STOCK)
WRITE, COPY = "raw O_DIRECT write", "memcpy, a thread per rank"
# A sample of the memory before anything is set up.
STILL_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a rank has to do."""

    system: str
    directory: Path
    num_bytes: int
    num_saves: int
    forward_s: float
    pause_s: float


@dataclass(kw_only=True)
class Save:
    """Seconds of one save of one rank; `collect_s` is part of `blocked_s`."""

    blocked_s: float = 0.0
    staged_s: float = 0.0
    durable_s: float = 0.0
    collect_s: float = 0.0
    event: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Run:
    """What one rank measured; the moments are of the monotonic clock, the same in all processes."""

    num_bytes: int
    set_up_s: float
    began_at: float
    saves: list[Save]


class Stopwatch:
    """Measures one save; the same steps for all systems."""

    def __init__(self, forward_s: float) -> None:
        self.save = Save()
        self._forward_s = forward_s
        # Stepping any optimizer passes our fence; this one has next to nothing to do.
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.zeros(1)
        self._probe = torch.optim.SGD([parameter])
        self._began = time.perf_counter()

    def elapsed_s(self) -> float:
        """Seconds since the save began."""
        return time.perf_counter() - self._began

    def follow(
        self, staged: Future[Any] | None, durable: Future[Any], *, is_fenced: bool = False
    ) -> None:
        """The call has returned: let the optimizer step when it may, and return when all is over.

        Args:
            staged: None if the call has copied everything.
            is_fenced: whether the optimizer waits for `staged` by itself.
        """
        self.save.blocked_s = self.save.staged_s = self.elapsed_s()
        marks = [self._mark("durable_s", durable)]
        if staged is not None:
            marks.append(self._mark("staged_s", staged))
        time.sleep(self._forward_s)
        waiting = time.perf_counter()
        if staged is not None and not is_fenced:
            staged.result()
        self._probe.step()
        self.save.blocked_s += time.perf_counter() - waiting
        durable.result()
        for mark in marks:
            mark.wait()  # a future calls back only after it has let go of those who wait for it

    def _mark(self, name: str, future: Future[Any]) -> threading.Event:
        """Note when a future is done; the event is set once that is noted."""
        is_noted = threading.Event()

        def note(_: object) -> None:
            setattr(self.save, name, self.elapsed_s())
            is_noted.set()

        future.add_done_callback(note)
        return is_noted


class Ours:
    """A Checkpointer."""

    def __init__(self, training: Training, root: Path, staging: Any) -> None:
        state = TrainState(model=training.model, optimizer=training.optimizer)
        self._checkpointer = Checkpointer(root, state, staging=staging)

    def save(self, step: int, watch: Stopwatch) -> None:
        """Save and measure."""
        pending = self._checkpointer.save(step)
        watch.follow(pending.staged, pending.committed, is_fenced=True)
        self._checkpointer.wait()
        watch.save.event = asdict(self._checkpointer.events[-1])

    def close(self) -> None:
        """End the writer."""
        self._checkpointer.close()


class Stock:
    """DCP as its documentation uses it; the state dict is made anew for each save."""

    def __init__(self, training: Training, root: Path, system: str) -> None:
        self._training, self._root, self._system = training, root, system
        # Its collectives run in the background, where they must not meet those of the training.
        self._group = dist.new_group(backend="gloo")
        self._stager = None
        if "stager" in system:
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=True,
                    use_async_staging=True,
                    use_non_blocking_copy=False,
                )
            )

    def save(self, step: int, watch: Stopwatch) -> None:
        """Save and measure."""
        state = stock_state(self._training)
        watch.save.collect_s = watch.elapsed_s()
        path = self._root / f"step-{step:08d}"
        if self._system == "dcp.save":
            dcp.save(state, checkpoint_id=path)
            done: Future[None] = Future()
            done.set_result(None)
            watch.follow(None, done)
            return
        kind = AsyncCheckpointerType.THREAD
        if "process" in self._system:
            kind = AsyncCheckpointerType.PROCESS
        response = dcp.async_save(
            state,
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            watch.follow(response.staging_completion, response.upload_completion)
        else:
            watch.follow(None, response)

    def close(self) -> None:
        """Give the stager's memory back."""
        if self._stager is not None:
            self._stager.close()


def stock_state(training: Training) -> dict[str, Any]:
    """What users of DCP save."""
    model, optimizer = training.model, training.optimizer
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def set_up(training: Training, task: Task) -> Ours | Stock:
    """The system, ready for its first save."""
    if task.system in STOCK:
        return Stock(training, task.directory, task.system)
    staging = "overlap" if task.system == OVERLAP else "block"
    return Ours(training, task.directory, staging)


def run_system(rank: int, num_ranks: int, task: Task) -> Run:
    """One system in this rank, from set-up to the last save."""
    (task.directory / "pids" / str(os.getpid())).touch()
    training = trainings.make_training(task.num_bytes)
    trainings.nudge(training)
    memory.trim_memory()
    common.barrier()
    time.sleep(STILL_S)
    began_at = time.monotonic()
    plain_s = clock(lambda: trainings.nudge(training))
    began = time.perf_counter()
    system = set_up(training, task)
    trainings.nudge(training)
    set_up_s = time.perf_counter() - began - plain_s
    time.sleep(task.pause_s)
    saves = []
    for step in range(1, task.num_saves + 1):
        saves.append(measure(system, step, task))
        trainings.nudge(training)
        common.barrier()
        if rank == 0:
            shutil.rmtree(task.directory / f"step-{step:08d}")
    system.close()
    return Run(
        num_bytes=trainings.count_bytes(training),
        set_up_s=set_up_s,
        began_at=began_at,
        saves=saves,
    )


def measure(system: Ours | Stock, step: int, task: Task) -> Save:
    """One save."""
    common.barrier()
    watch = Stopwatch(task.forward_s)
    system.save(step, watch)
    return watch.save


def clock(work: Callable[[], None]) -> float:
    """Seconds that something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def run_limits(rank: int, num_ranks: int, task: Task) -> dict[str, float]:
    """What disk and memory can do, all ranks at once."""
    num_bytes = task.num_bytes // num_ranks
    common.barrier()
    write_s = limits.raw_write(task.directory / f"raw-{rank}", num_bytes)
    limits.copy_memory(num_bytes)  # the first touches the buffers' pages
    common.barrier()
    return {WRITE: write_s, COPY: limits.copy_memory(num_bytes)}
