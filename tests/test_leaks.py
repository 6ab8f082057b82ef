"""Many saves in one process leave nothing behind: descriptors, threads, processes, memory, files."""

import gc
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from loops import train_state

from backstay import Checkpointer, RetentionPolicy
from backstay.testing import run_ranks
from backstay.testing.models import make_training, train_step

NUM_SAVES = 200
WARM_UP = 40
# Noise of allocator and interpreter; a leak of one page per save would be above it.
SLACK_KIB = 4096


@dataclass(frozen=True)
class Usage:
    """What a process holds; memory in KiB, of trainer and writer."""

    num_fds: int
    num_threads: int
    children: tuple[int, ...]
    writer_fds: int
    writer_kib: int
    trainer_kib: int


def test_200_saves_leave_descriptors_threads_processes_and_memory_flat(tmp_path: Path) -> None:
    """Two ranks under FSDP2, with frozen files, retention and a save after every step."""
    # Not forked: what is shared with a server that has imported much is copied bit by bit as its objects are touched, and looks like a leak.
    found = run_ranks(2, save_often, tmp_path, timeout_s=110, start="spawn")
    for early, late, end in found:
        assert late.num_fds == early.num_fds
        assert late.num_threads == early.num_threads
        assert late.children == early.children
        assert late.writer_fds == early.writer_fds
        assert late.writer_kib - early.writer_kib < SLACK_KIB
        assert late.trainer_kib - early.trainer_kib < SLACK_KIB
        assert end.children == ()
        assert end.num_threads < late.num_threads
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "step-00000199", "step-00000200"]


def save_often(rank: int, world_size: int, root: Path) -> tuple[Usage, Usage, Usage]:
    training = make_training("fsdp2")
    early = None
    with Checkpointer(root, train_state(training), keep=RetentionPolicy(last=2)) as checkpointer:
        for step in range(1, NUM_SAVES + 1):
            train_step(training)
            checkpointer.save(step)
            if step == WARM_UP:
                checkpointer.wait()
                early = usage()
        checkpointer.wait()
        late = usage()
    assert early is not None
    return early, late, usage()


def usage() -> Usage:
    gc.collect()
    me = os.getpid()
    children = tuple(map(int, Path(f"/proc/{me}/task/{me}/children").read_text().split()))
    return Usage(
        num_fds=len(os.listdir("/proc/self/fd")),
        num_threads=threading.active_count(),
        children=children,
        writer_fds=len(os.listdir(f"/proc/{children[0]}/fd")) if children else 0,
        writer_kib=sum(map(private_kib, children)),
        trainer_kib=private_kib(me),
    )


def private_kib(pid: int) -> int:
    """Memory that is this process's alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private"))


SCRIPT = """
import sys, torch
from backstay import Checkpointer, TrainState
checkpointer = Checkpointer(sys.argv[1], TrainState(model=torch.nn.Linear(2, 2)))
checkpointer.save(1)
print(open(f"/proc/self/task/{__import__('os').getpid()}/children").read().strip())
"""


def test_nothing_is_left_after_the_end_of_a_process_that_closed_nothing(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert not Path(f"/proc/{int(found.stdout)}").exists()
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "step-00000001"]
