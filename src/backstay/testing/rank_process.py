"""What happens in a rank that `run_ranks` started: set the process up, call the function, leave its result in a file.

Runs in: the main thread of each rank; a daemon thread watches for the end of the caller.
Guarantees: result, traceback, stacks and output are in files of their own, whatever ends the rank; the rank dies with the caller.
Assumes: the process is new, or freshly forked from a server that only imported modules.
"""

import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path


@dataclass(frozen=True)
class RankFiles:
    """The files through which a rank reports."""

    folder: Path
    rank: int

    @property
    def result(self) -> Path:
        return self.folder / f"{self.rank}.result"

    @property
    def error(self) -> Path:
        return self.folder / f"{self.rank}.error"

    @property
    def stacks(self) -> Path:
        return self.folder / f"{self.rank}.stacks"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.rank}.output"

    def read(self, path: Path) -> str:
        return path.read_text(errors="replace") if path.exists() else ""


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """All that a rank is told. `timeout_s` is None where there is no process group."""

    rank: int
    world_size: int
    payload: Path
    files: RankFiles
    cwd: str
    env: dict[str, str]
    timeout_s: float | None


def rank_main(task: RankTask) -> None:
    """The whole life of a rank."""
    _settle(task)
    try:
        result = _call(task)
        task.files.result.write_bytes(pickle.dumps(result))
        _leave_group()
    except BaseException:
        # The outermost frame of this process: the caller raises it on its side.
        task.files.error.write_text(traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads that the failed function left behind must not keep the rank alive


def _settle(task: RankTask) -> None:
    """Make this process what the caller expects, and make sure that it ends."""
    threading.Thread(target=_die_with_caller, name="caller-watch", daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.open(task.files.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    stacks = open(task.files.stacks, "w")  # noqa: SIM115 - faulthandler needs it open for good
    faulthandler.enable(stacks)
    os.environ.clear()
    os.environ.update(task.env)
    os.chdir(task.cwd)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all ranks inherit one state from the server


def _die_with_caller() -> None:
    # PR_SET_PDEATHSIG would not do: a forked rank's parent is the server, which lives as long as its ranks.
    caller = multiprocessing.parent_process()
    assert caller is not None, "a rank is always started through multiprocessing"
    wait([caller.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _call(task: RankTask) -> object:
    fn, args = pickle.loads(task.payload.read_bytes())
    if task.timeout_s is not None:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout_s))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    return fn(task.rank, task.world_size, *args)


def _leave_group() -> None:
    """Close the process group, unless the function did."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
