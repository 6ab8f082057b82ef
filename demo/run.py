"""Run the recipe's command, kill one rank in the middle of a save, and read what the run wrote down."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from backstay import Catalog
from backstay.events import read_lines

POLL_S = 0.05
RUN_LIMIT_S = 600.0
PATIENCE_S = 13.0


@dataclass(frozen=True)
class Kill:
    """What was killed, and when.

    Attributes:
        rank, pid: of the process.
        saving: the step whose save was being written.
        trained: the last step that had been trained by then.
    """

    rank: int
    pid: int
    saving: int
    trained: int


def run(command: Sequence[str]) -> int:
    """Run a command to its end; returns the exit status."""
    return subprocess.run(command, timeout=RUN_LIMIT_S, check=False).returncode


def run_and_kill(command: Sequence[str], out: Path, *, rank: int) -> Kill:
    """Run a command and send SIGKILL to one rank while a save is being written and training goes on.

    Raises:
        RuntimeError: the run came to its end before that.
    """
    process = subprocess.Popen(command)
    deadline = time.monotonic() + RUN_LIMIT_S
    seen_at: dict[int, float] = {}
    try:
        while process.poll() is None and time.monotonic() < deadline:
            saving = find_save(out)
            trained = last_step(out)
            if saving is not None and is_time(trained - saving, seen_at.setdefault(saving, now())):
                pid = find_rank(process.pid, rank)
                os.kill(pid, signal.SIGKILL)
                process.wait(RUN_LIMIT_S)
                return Kill(rank, pid, saving, trained)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)
    raise RuntimeError("the run ended before a save could be interrupted; see its messages above")


def is_time(num_steps: int, began: float) -> bool:
    """Whether to kill: two steps past the one that is being saved, or one where steps are slow."""
    return num_steps >= 2 or (num_steps == 1 and now() - began > PATIENCE_S)


def now() -> float:
    """A clock."""
    return time.monotonic()


def find_save(out: Path) -> int | None:
    """The step that is being written right now."""
    checkpoints = out / "checkpoints"
    live = [one.step for one in Catalog(checkpoints).incomplete() if one.is_live]
    return max(live, default=None)


def last_step(out: Path) -> int:
    """The last step that was logged."""
    return max((line["step"] for line in read_lines(out / "metrics.jsonl")), default=0)


def find_rank(launcher: int, rank: int) -> int:
    """Process id of a rank below its launcher."""
    for pid in children(launcher):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"RANK=%d" % rank in environment:
            return pid
    raise RuntimeError(f"process {launcher} has no child that is rank {rank}")


def children(pid: int) -> Iterator[int]:
    """Process ids of the children of a process."""
    for tasks in Path(f"/proc/{pid}/task").iterdir():
        yield from map(int, (tasks / "children").read_text().split())
