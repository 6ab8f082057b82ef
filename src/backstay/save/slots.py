"""Write slots: how many writers of one node may write at once. Lock files, so that a dead writer frees its slot.

Runs in: the writer.
"""

import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.1


@contextmanager
def write_slot(num_slots: int, *, limit_s: float, watch: Callable[[], None]) -> Iterator[None]:
    """Hold one of this node's slots; none is needed where `num_slots` is 0.

    Args:
        limit_s: how long to wait for one.
        watch: called while waiting; what it raises ends the wait.

    Raises:
        TimeoutError: all slots stayed taken.
    """
    if num_slots <= 0:
        yield
        return
    fd = take_slot(num_slots, limit_s=limit_s, watch=watch)
    try:
        yield
    finally:
        os.close(fd)


def take_slot(num_slots: int, *, limit_s: float, watch: Callable[[], None]) -> int:
    """A descriptor that holds a slot until it is closed."""
    directory = slot_directory()
    deadline = time.monotonic() + limit_s
    pause_s = FIRST_PAUSE_S
    while True:
        for number in range(num_slots):
            if (fd := try_slot(directory / f"slot-{number}")) is not None:
                return fd
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"all {num_slots} write slots in {directory} stayed taken for {limit_s} s"
            )
        watch()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


def try_slot(path: Path) -> int | None:
    """The slot's locked descriptor, or None if it is taken."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def slot_directory() -> Path:
    """Where this user's slots are on this node."""
    path = Path(f"/tmp/backstay-slots-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    # /tmp is open to all: a directory that somebody else put there could hold us up for ever.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{path} must be a directory of user {os.getuid()}")
    return path
