"""Drafts: directories beside an export that are not, or not yet, visible as one; and the removal of those that nobody works on any more.

A draft `NAME.KIND-xxxxxxxx` has a lock file `.NAME.KIND-xxxxxxxx.lock` beside it, with an flock that the kernel drops however its holder
ends. A draft with a free lock is left over. Nothing without such a lock file is ever touched.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from backstay.errors import InvalidArgument
from backstay.storage.local import make_directory, sync_directory

log = logging.getLogger("backstay")
_LOCK = re.compile(r"\.(.+\.(?:incomplete|source)-[0-9a-f]{8})\.lock")


class Draft:
    """A new directory beside `out`, locked by this process until it is published or discarded.

    Args:
        out: what it is a draft of; its parent is made if need be.
        kind: "incomplete": becomes `out`. "source": what an export is made from, and hidden.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, out: Path, kind: str = "incomplete") -> None:
        self.out = out
        name = f"{out.name}.{kind}-{secrets.token_hex(4)}"
        hidden = "." if kind == "source" else ""
        make_directory(out.parent)
        self.path = out.with_name(f"{hidden}{name}")
        self._lock_path = out.with_name(f".{name}.lock")
        self.lock_fd = take_new_lock(self._lock_path)
        try:
            self.path.mkdir()
        except OSError:
            self._unlock()
            raise

    def publish(self) -> None:
        """Give the directory its name, all at once and durably.

        Raises:
            InvalidArgument: something else has it by now.
            OSError: it cannot be renamed.
        """
        for folder in [path for path in self.path.rglob("*") if path.is_dir()]:
            sync_directory(folder)
        sync_directory(self.path)
        check_free(self.out)
        os.rename(self.path, self.out)
        sync_directory(self.out.parent)
        self._unlock()

    def discard(self) -> None:
        """Remove the directory, unless it is published; errors are logged only."""
        if self.lock_fd < 0:
            return
        remove_tree(self.path)
        self._unlock()

    def _unlock(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self.lock_fd)
        self.lock_fd = -1


def check_free(out: Path) -> None:
    """See that nothing is called `out`.

    Raises:
        InvalidArgument: something is.
    """
    if os.path.lexists(out):
        raise InvalidArgument(
            f"{out} exists; an export is never overwritten. Remove it, or export under another name"
        )


def sweep(folder: Path) -> None:
    """Remove what killed exports left in a directory; errors are logged only."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    for name in names:
        match = _LOCK.fullmatch(name)
        if match is not None:
            sweep_one(folder, match[1], folder / name)


def sweep_one(folder: Path, name: str, lock_path: Path) -> None:
    """Remove one draft and its lock, if the lock is free."""
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # it is gone, or somebody else's
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody works on it, or this file system cannot tell
        os.close(fd)
        return
    try:
        for path in (folder / name, folder / f".{name}"):
            if path.is_dir() and not path.is_symlink():
                log.warning("removing %s: left over from an export that was killed", path)
                remove_tree(path)
        with suppress(OSError):
            lock_path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def take_new_lock(path: Path) -> int:
    """Make a lock file and lock it; a descriptor."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            log.info("%s cannot be locked (%s): leftovers will not be found", path.parent, error)
            return fd
        # Somebody may have taken it for a leftover in between, and removed it.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a directory of ours; what cannot be removed is logged."""

    def note(_function: object, place: str, failure: object) -> None:
        log.warning("could not remove %s: %s", place, failure)

    if path.exists():
        shutil.rmtree(path, onerror=lambda function, place, info: note(function, place, info[1]))
