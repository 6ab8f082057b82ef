"""Names under a checkpoint root, and the records and locks by which the ranks of one attempt to save know of each other.

An attempt has a directory `.attempts/<attempt>/`. While a writer works for it, it holds an flock on `rank-K.lock`; the kernel
drops that lock however the writer ends, so liveness needs no heartbeat. What a rank has to say is one file, put atomically:
`rank-K.done`, `rank-K.failed`, and rank 0's `committed`. No torch here.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from backstay.errors import CorruptCheckpoint
from backstay.manifest import MANIFEST_NAME, FileRecord, Manifest
from backstay.storage.local import put_file

ATTEMPTS_DIR = ".attempts"
COMMITTED_NAME = "committed"
# A lock that looks free may be held on another host, where the file system does not carry flock across hosts.
FOREIGN_GRACE_S = 3600.0

_ATTEMPT = r"[0-9a-f]{8}-\d{4,}"
_STEP = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(rf"step-(\d{{8,}})\.(incomplete|pruned|damaged)-({_ATTEMPT})")
_RECORD = re.compile(r"rank-(\d{5,})\.(done|failed|lock)")

Fate = Literal["committed", "written", "failed"]


@dataclass(frozen=True)
class Leftover:
    """A directory beside the committed ones that Backstay made: "incomplete", "pruned" or "damaged"."""

    name: str
    step: int
    kind: str
    attempt: str


@dataclass(frozen=True, kw_only=True)
class Lock:
    """What a writer's lock file says; `is_held` is the kernel's word, the rest its holder's."""

    rank: int
    step: int
    pid: int
    host: str
    is_held: bool

    @property
    def is_here(self) -> bool:
        """Whether the holder runs, or ran, on this very host, so that a free lock proves its end."""
        return self.host == host_identity()


@dataclass(frozen=True, kw_only=True)
class DoneRecord:
    """A rank's files are durable: their records, and what writing them took."""

    rank: int
    host: str
    files: tuple[FileRecord, ...]
    seconds: float
    hash_seconds: float
    cpu_seconds: float
    direct: bool

    @property
    def num_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an attempt failed: on which rank first, the name of an error class or errno, and the cause in words."""

    rank: int
    kind: str
    cause: str


# Names ----------------------------------------------------------------------------------------------------------------


def step_dir_name(step: int) -> str:
    """Name of a committed checkpoint's directory."""
    return f"step-{step:08d}"


def parse_step(name: str) -> int | None:
    """The step of a committed checkpoint's directory name, None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def leftover_name(step: int, kind: str, attempt: str) -> str:
    """Name of a directory that is not, or no longer, a committed checkpoint."""
    return f"{step_dir_name(step)}.{kind}-{attempt}"


def parse_leftover(name: str) -> Leftover | None:
    """The inverse of `leftover_name`, None for any other name."""
    match = _LEFTOVER.fullmatch(name)
    return Leftover(name, int(match[1]), match[2], match[3]) if match else None


def is_attempt(name: str) -> bool:
    """Whether a name has the form of an attempt's."""
    return re.fullmatch(_ATTEMPT, name) is not None


def attempt_dir(root: Path, attempt: str) -> Path:
    """Where the records and locks of an attempt are."""
    return root / ATTEMPTS_DIR / attempt


def host_identity() -> str:
    """Name of this host and a mark of its boot: containers of one host share it, clones of one image do not."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        boot = "?"
    return f"{os.uname().nodename}:{boot}"


# Records --------------------------------------------------------------------------------------------------------------


def put_done(root: Path, attempt: str, record: DoneRecord) -> None:
    """Say that this rank's part is durable."""
    path = attempt_dir(root, attempt) / f"rank-{record.rank:05d}.done"
    put_file(path, json.dumps(asdict(record)).encode())


def read_done(root: Path, attempt: str, rank: int) -> DoneRecord:
    """What a rank wrote."""
    fields = json.loads((attempt_dir(root, attempt) / f"rank-{rank:05d}.done").read_bytes())
    files = tuple(FileRecord.from_fields(file) for file in fields.pop("files"))
    return DoneRecord(files=files, **fields)


def put_failed(root: Path, attempt: str, rank: int, failure: Failure) -> None:
    """Say, on behalf of `rank`, that the attempt failed; `failure.rank` is where it went wrong first."""
    path = attempt_dir(root, attempt) / f"rank-{rank:05d}.failed"
    put_file(path, json.dumps(asdict(failure)).encode())


def read_failure(root: Path, attempt: str) -> Failure | None:
    """The failure of an attempt as told by the lowest rank that recorded one."""
    for rank in sorted(recorded_ranks(root, attempt, "failed")):
        return Failure(
            **json.loads((attempt_dir(root, attempt) / f"rank-{rank:05d}.failed").read_bytes())
        )
    return None


def recorded_ranks(root: Path, attempt: str, kind: Literal["done", "failed", "lock"]) -> set[int]:
    """The ranks with a record of that kind; FileNotFoundError if the attempt's directory is gone."""
    matches = map(_RECORD.fullmatch, os.listdir(attempt_dir(root, attempt)))
    return {int(match[1]) for match in matches if match and match[2] == kind}


def put_committed(root: Path, attempt: str) -> None:
    """Say that the attempt's checkpoint is published."""
    put_file(attempt_dir(root, attempt) / COMMITTED_NAME, b"{}")


def is_committed(root: Path, attempt: str, step: int) -> bool:
    """Whether the attempt's checkpoint is published: rank 0 said so, or the final directory says so."""
    if (attempt_dir(root, attempt) / COMMITTED_NAME).exists():
        return True
    path = root / step_dir_name(step) / MANIFEST_NAME
    try:
        return Manifest.from_json(path.read_bytes(), source=str(path)).attempt == attempt
    except (OSError, CorruptCheckpoint):
        return False


def record_failure(
    root: str | Path, attempt: str, *, step: int, rank: int, kind: str, cause: str
) -> Fate:
    """On behalf of a rank whose writer is gone, say that it failed, unless it had done its part.

    Returns:
        "committed": the checkpoint is published. "written": this rank (not 0) had done its part, so the outcome is up to
        the others; `await_outcome` tells it. "failed": the failure is recorded (or could not be, then the others notice the dead writer's lock).
    """
    root = Path(root)
    directory = attempt_dir(root, attempt)
    if (directory / COMMITTED_NAME).exists():
        return "committed"
    # Rank 0's writer alone commits. Without it the final directory tells; while it lives, that name may be taken back.
    if rank == 0 and is_committed(root, attempt, step):
        return "committed"
    if rank != 0 and (directory / f"rank-{rank:05d}.done").exists():
        return "written"
    try:
        os.makedirs(directory, exist_ok=True)
        put_failed(root, attempt, rank, Failure(rank=rank, kind=kind, cause=cause))
    except OSError:
        pass
    return "failed"


# Locks ----------------------------------------------------------------------------------------------------------------


def hold_lock(root: Path, attempt: str, *, rank: int, step: int) -> int:
    """Create this writer's lock file, locked from the first moment it can be seen; closing the descriptor frees it."""
    directory = attempt_dir(root, attempt)
    draft = directory / f".rank-{rank:05d}.lock.{os.getpid()}"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(
            fd, json.dumps({"host": host_identity(), "pid": os.getpid(), "step": step}).encode()
        )
        os.replace(draft, directory / f"rank-{rank:05d}.lock")
    except OSError:
        os.close(fd)
        draft.unlink(missing_ok=True)
        raise
    return fd


def read_lock(root: Path, attempt: str, rank: int) -> Lock | None:
    """State of a rank's lock; None if there is none."""
    try:
        fd = os.open(
            attempt_dir(root, attempt) / f"rank-{rank:05d}.lock", os.O_RDONLY | os.O_CLOEXEC
        )
    except FileNotFoundError:
        return None
    try:
        return Lock(rank=rank, is_held=_is_held(fd), **_parse_lock(os.read(fd, 65536)))
    finally:
        os.close(fd)


def _parse_lock(data: bytes) -> dict[str, Any]:
    """Who held a lock; a power cut may have left its file empty, then nobody that is known."""
    try:
        fields = json.loads(data)
        return {"step": int(fields["step"]), "pid": int(fields["pid"]), "host": str(fields["host"])}
    except (ValueError, KeyError, TypeError):
        return {"step": -1, "pid": -1, "host": ""}


def _is_held(fd: int) -> bool:
    """Probed with a shared lock, so that two who look at once do not take each other for the holder."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        # Either it is held, or this file system has no flock and nobody may conclude that the holder is dead.
        return True
    return False


def read_locks(root: Path, attempt: str) -> list[Lock]:
    """State of all locks of an attempt."""
    try:
        ranks = sorted(recorded_ranks(root, attempt, "lock"))
    except FileNotFoundError:
        return []
    return [lock for rank in ranks if (lock := read_lock(root, attempt, rank)) is not None]


def list_attempts(root: Path) -> Iterator[str]:
    """Names of all attempts with a directory."""
    try:
        names = sorted(os.listdir(root / ATTEMPTS_DIR))
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from filter(is_attempt, names)


def is_live(root: Path, attempt: str) -> bool:
    """Whether some writer may still work for the attempt."""
    locks = read_locks(root, attempt)
    if any(lock.is_held for lock in locks):
        return True
    return any(not lock.is_here for lock in locks) and _is_young(attempt_dir(root, attempt))


def _is_young(directory: Path) -> bool:
    try:
        return time.time() - directory.stat().st_mtime < FOREIGN_GRACE_S
    except FileNotFoundError:
        return False
