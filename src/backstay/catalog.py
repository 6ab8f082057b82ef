"""The set of checkpoints under a root: which are committed, which are whole, what else lies there. No torch, nothing is changed.

Everything is read anew at each call: a training run may commit and prune meanwhile.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from backstay.attempts import is_live, list_attempts, parse_leftover, parse_step, read_locks
from backstay.errors import CheckpointNotFound, CorruptCheckpoint, InvalidArgument
from backstay.manifest import MANIFEST_NAME, FileRecord, Manifest

log = logging.getLogger("backstay")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One committed checkpoint."""

    step: int
    path: Path
    manifest: Manifest

    def problems(self, verify: str = "size") -> list[str]:
        """What is wrong with its files; empty if it is whole.

        Args:
            verify: "size": all files are there with their exact sizes. "full": their hashes fit as well (reads everything).
        """
        if verify not in ("size", "full"):
            raise InvalidArgument(f"verify={verify!r}: expected 'size' or 'full'")
        check: Callable[[Path, FileRecord], str | None] = (
            find_size_problem if verify == "size" else find_hash_problem
        )
        return [
            problem
            for file in self.manifest.files
            if (problem := check(self.path, file)) is not None
        ]


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A directory with a checkpoint's name that cannot be used, and why."""

    step: int
    path: Path
    reason: str


@dataclass(frozen=True, kw_only=True)
class Incomplete:
    """A directory of an attempt that was not committed; `is_live`: its writers may still commit it."""

    step: int
    attempt: str
    path: Path
    is_live: bool


@dataclass(frozen=True, kw_only=True)
class LiveAttempt:
    """An attempt that writers work for right now, and the ranks whose writers do."""

    attempt: str
    step: int
    ranks: tuple[int, ...]


# Inside `Catalog` the name `list` is its method.
Entries = list[Entry]
Skips = list[Skipped]
Incompletes = list[Incomplete]
LiveAttempts = list[LiveAttempt]


class Catalog:
    """The checkpoints under `root`, which need not exist."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def __repr__(self) -> str:
        return f"Catalog({str(self.root)!r})"

    def list(self) -> Entries:
        """The committed checkpoints with a readable manifest, by step, ascending."""
        return self.scan()[0]

    def scan(self) -> tuple[Entries, Skips]:
        """The committed checkpoints, and the directories that have the name of one but cannot be used; both ascending."""
        entries: Entries = []
        skipped: Skips = []
        for step, path in sorted(self._candidates()):
            try:
                entries.append(self._read_entry(step, path))
            except CheckpointNotFound:
                continue
            except (CorruptCheckpoint, OSError) as error:
                skipped.append(Skipped(step=step, path=path, reason=str(error)))
        return entries, skipped

    def get(self, step: int) -> Entry:
        """The checkpoint of that step, whether or not its files are whole.

        Raises:
            CheckpointNotFound: there is none; the message names those that are there.
            CorruptCheckpoint: its manifest cannot be used.
        """
        entries, skipped = self.scan()
        for entry in entries:
            if entry.step == step:
                return entry
        for bad in skipped:
            if bad.step == step:
                raise CorruptCheckpoint(f"step {step}: {bad.reason}")
        there = ", ".join(str(entry.step) for entry in entries) or "none"
        raise CheckpointNotFound(
            f"no committed checkpoint of step {step} under {self.root}; steps there: {there}"
        )

    def latest(self) -> Entry | None:
        """The newest checkpoint that is whole by size; what had to be skipped is logged with the reason."""
        return self.walk_back()[0]

    def walk_back(self, verify: str = "size") -> tuple[Entry | None, Skips]:
        """The newest whole checkpoint, and the newer ones that are not, newest first, with the reason (logged as well)."""
        entries, skipped = self.scan()
        by_step: Sequence[Entry | Skipped] = sorted(
            [*entries, *skipped], key=lambda one: one.step, reverse=True
        )
        passed: Skips = []
        for one in by_step:
            if isinstance(one, Entry):
                problems = one.problems(verify)
                if not problems:
                    return one, passed
                one = Skipped(step=one.step, path=one.path, reason=shorten(problems))
            log.warning("skipping step %d at %s: %s", one.step, one.path, one.reason)
            passed.append(one)
        return None, passed

    def incomplete(self) -> Incompletes:
        """Attempts that left a directory but no checkpoint, by step."""
        found = [
            leftover for name in self._names() if (leftover := parse_leftover(name)) is not None
        ]
        return sorted(
            (
                Incomplete(
                    step=leftover.step,
                    attempt=leftover.attempt,
                    path=self.root / leftover.name,
                    is_live=is_live(self.root, leftover.attempt),
                )
                for leftover in found
                if leftover.kind == "incomplete"
            ),
            key=lambda one: (one.step, one.attempt),
        )

    def find_live_attempts(self) -> LiveAttempts:
        """Attempts whose locks are held by live writers, by step: a restore may wait for them to be committed."""
        live = []
        for attempt in list_attempts(self.root):
            held = [lock for lock in read_locks(self.root, attempt) if lock.is_held]
            if held:
                ranks = tuple(lock.rank for lock in held)
                live.append(LiveAttempt(attempt=attempt, step=held[0].step, ranks=ranks))
        return sorted(live, key=lambda one: one.step)

    def _names(self) -> Sequence[str]:
        try:
            return os.listdir(self.root)
        except FileNotFoundError:
            return []

    def _candidates(self) -> Sequence[tuple[int, Path]]:
        return [
            (step, self.root / name)
            for name in self._names()
            if (step := parse_step(name)) is not None
        ]

    def _read_entry(self, step: int, path: Path) -> Entry:
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise CorruptCheckpoint(f"{path} is a link that leads out of {self.root}")
        try:
            data = (path / MANIFEST_NAME).read_bytes()
        except FileNotFoundError:
            if not path.is_dir():
                raise CheckpointNotFound(f"{path} was removed") from None
            raise CorruptCheckpoint(
                f"{path} has no {MANIFEST_NAME}: it was never committed, or was damaged"
            ) from None
        manifest = Manifest.from_json(data, source=str(path / MANIFEST_NAME))
        if manifest.step != step:
            raise CorruptCheckpoint(f"{path} holds step {manifest.step}: the directory was renamed")
        return Entry(step=manifest.step, path=path, manifest=manifest)


def shorten(problems: Sequence[str]) -> str:
    """A few problems in one line, however many there are."""
    shown = "; ".join(problems[:3])
    return shown if len(problems) <= 3 else f"{shown}; and {len(problems) - 3} more"


def find_size_problem(directory: Path, file: FileRecord) -> str | None:
    """Why a file is not the one recorded, as far as its name and size tell; None if it may be."""
    path = directory / file.path
    if not path.resolve().is_relative_to(directory.resolve()):
        return f"{file.path} is a link that leads out of the checkpoint"
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return f"{file.path} is missing"
    return (
        None
        if size == file.num_bytes
        else f"{file.path} has {size} bytes, expected {file.num_bytes}"
    )


def find_hash_problem(directory: Path, file: FileRecord) -> str | None:
    """As `find_size_problem`, and by content."""
    problem = find_size_problem(directory, file)
    if problem is not None:
        return problem
    with (directory / file.path).open("rb") as reader:
        for chunk, expected in enumerate(file.chunk_hashes):
            if xxhash.xxh3_64_hexdigest(reader.read(file.chunk_bytes)) != expected:
                return f"{file.path} differs from what was saved in chunk {chunk} (bytes from {chunk * file.chunk_bytes})"
    return None
