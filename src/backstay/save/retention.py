"""Prune: remove what no policy protects, finish what an earlier prune left, clear dead attempts away.

Runs in: rank 0's writer, after a commit. Guarantees: only committed checkpoints of this run are candidates, never the one just
committed; a candidate loses its final name first, in one rename, so that no half-deleted directory passes for a checkpoint; files that
Backstay did not write are not deleted, directories whose names are not Backstay's are not even opened. Assumes: nothing about
success: what cannot be deleted is noted once and tried again after the next commit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import xxhash

from backstay import points
from backstay.attempts import (
    ATTEMPTS_DIR,
    Leftover,
    is_live,
    leftover_name,
    list_attempts,
    parse_leftover,
    parse_step,
)
from backstay.errors import CorruptCheckpoint
from backstay.manifest import MANIFEST_NAME, FileRecord, Manifest
from backstay.policies import RetentionPolicy
from backstay.save.rank_write import trainable_digest
from backstay.storage.base import Storage

# In a directory being pruned the manifest has this name: the list of what to delete, but no checkpoint.
PRUNED_MANIFEST_NAME = "manifest.pruned.json"


@dataclass(frozen=True)
class Shelved:
    """A committed checkpoint as retention sees it; `manifest` is without its files, to keep the writer small."""

    name: str
    manifest: Manifest
    digest: str


@dataclass(kw_only=True)
class Shelf:
    """The committed checkpoints of one run. Manifests are parsed once each, as long as their bytes are the same."""

    storage: Storage
    run_id: str
    _parsed: dict[str, tuple[int, Shelved | None]] = field(default_factory=dict)

    def read(self) -> list[Shelved]:
        """All of them by step; those that can't be read, or belong to another run, are left out."""
        names = [name for name in self.storage.list_names("") if parse_step(name) is not None]
        self._parsed = {name: self._parsed[name] for name in names if name in self._parsed}
        found = [shelved for name in names if (shelved := self._read_one(name)) is not None]
        return sorted(found, key=lambda shelved: shelved.manifest.step)

    def find_before(self, step: int) -> Shelved | None:
        """The newest with a smaller step."""
        earlier = [shelved for shelved in self.read() if shelved.manifest.step < step]
        return earlier[-1] if earlier else None

    def _read_one(self, name: str) -> Shelved | None:
        # A link may lead to files that are not ours to delete.
        if not self.storage.is_dir(name):
            return None
        try:
            data = self.storage.read(f"{name}/{MANIFEST_NAME}")
        except OSError:
            return None
        mark = xxhash.xxh3_64_intdigest(data)
        if name not in self._parsed or self._parsed[name][0] != mark:
            self._parsed[name] = (mark, self._parse(name, data))
        return self._parsed[name][1]

    def _parse(self, name: str, data: bytes) -> Shelved | None:
        try:
            manifest = Manifest.from_json(data, source=name)
        except CorruptCheckpoint:
            return None
        if manifest.run_id != self.run_id or manifest.step != parse_step(name):
            return None
        return Shelved(name, replace(manifest, files=()), trainable_digest(manifest.files))


@dataclass(kw_only=True)
class Pruner:
    """Deletes for one run.

    Attributes:
        note: told of each path that could not be deleted, once.
    """

    storage: Storage
    root: Path
    shelf: Shelf
    policy: RetentionPolicy
    note: Callable[[str], None]
    _noted: set[str] = field(default_factory=set)

    def prune(self, *, step: int, attempt: str) -> None:
        """Do all that is due after the commit of `step` by `attempt`."""
        for shelved in select_expired(self.shelf.read(), self.policy, newest_step=step):
            self._try(shelved.name, partial(self._withdraw, shelved, attempt))
        for leftover in self._leftovers("pruned"):
            self._try(leftover.name, partial(self._delete_pruned, leftover.name))
        for leftover in self._leftovers("incomplete"):
            if self._is_dead(leftover.attempt, attempt):
                delete = partial(delete_tree, self.storage, leftover.name)
                self._try(leftover.name, delete)
        self.clear_attempts(lambda other: self._is_dead(other, attempt))

    def clear_attempts(self, is_over: Callable[[str], bool]) -> None:
        """Remove the records of attempts that are over, and their directory once it is empty."""
        for attempt in list_attempts(self.root):
            if is_over(attempt):
                path = f"{ATTEMPTS_DIR}/{attempt}"
                self._try(path, lambda path=path: delete_tree(self.storage, path))  # type: ignore[misc]

    def discard(self, directory: str) -> None:
        """Remove the directory of a failed attempt."""
        self._try(directory, lambda: delete_tree(self.storage, directory))

    def _withdraw(self, shelved: Shelved, attempt: str) -> None:
        self.storage.rename(shelved.name, leftover_name(shelved.manifest.step, "pruned", attempt))

    def _delete_pruned(self, name: str) -> None:
        """Delete the manifest's files, then the directories if nobody else's files are in them."""
        points.reach("prune.manifest")
        if self.storage.exists(f"{name}/{MANIFEST_NAME}"):
            self.storage.rename(f"{name}/{MANIFEST_NAME}", f"{name}/{PRUNED_MANIFEST_NAME}")
        for file in self._files_of(name):
            points.reach("prune.file")
            self.storage.delete_file(f"{name}/{file.path}")
        points.reach("prune.last")
        for directory in inner_directories(self.storage, name):
            if not self.storage.list_names(directory):
                self.storage.delete_dir(directory)
        foreign = [
            entry for entry in self.storage.list_names(name) if entry != PRUNED_MANIFEST_NAME
        ]
        if foreign:
            self._note_once(
                name, f"kept {name}: it holds {', '.join(foreign)}, which Backstay did not write"
            )
            return
        self.storage.delete_file(f"{name}/{PRUNED_MANIFEST_NAME}")
        self.storage.delete_dir(name)

    def _files_of(self, name: str) -> tuple[FileRecord, ...]:
        try:
            data = self.storage.read(f"{name}/{PRUNED_MANIFEST_NAME}")
            return Manifest.from_json(data, source=name).files
        except (FileNotFoundError, CorruptCheckpoint):
            return ()

    def _leftovers(self, kind: str) -> list[Leftover]:
        found = [
            leftover
            for name in self.storage.list_names("")
            if (leftover := parse_leftover(name)) is not None
        ]
        return [
            leftover
            for leftover in found
            if leftover.kind == kind and self.storage.is_dir(leftover.name)
        ]

    def _is_dead(self, attempt: str, committed: str) -> bool:
        """Whether an attempt is over; those of this incarnation after the one just committed may be beginning right now."""
        incarnation, _, counter = attempt.partition("-")
        current, _, current_counter = committed.partition("-")
        if incarnation == current and int(counter) >= int(current_counter):
            return False
        return not is_live(self.root, attempt)

    def _try(self, path: str, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._note_once(
                path, f"could not remove {path}, will try again after the next commit: {error}"
            )

    def _note_once(self, path: str, text: str) -> None:
        if path not in self._noted:
            self._noted.add(path)
            self.note(text)


def select_expired(
    shelf: list[Shelved], policy: RetentionPolicy, *, newest_step: int
) -> list[Shelved]:
    """What to prune; the checkpoint of `newest_step` was just committed and stays whatever the policy says."""
    expired = set(policy.select_expired([shelved.manifest for shelved in shelf])) - {newest_step}
    return [shelved for shelved in shelf if shelved.manifest.step in expired]


def inner_directories(storage: Storage, name: str) -> list[str]:
    """All directories below `name`, innermost first."""
    found = []
    for entry in storage.list_names(name):
        path = f"{name}/{entry}"
        if storage.is_dir(path):
            found += [*inner_directories(storage, path), path]
    return found


def delete_tree(storage: Storage, name: str) -> None:
    """Delete a directory that is Backstay's alone, with all in it; links are deleted, not followed."""
    for entry in storage.list_names(name):
        path = f"{name}/{entry}"
        if storage.is_dir(path):
            delete_tree(storage, path)
        else:
            storage.delete_file(path)
    storage.delete_dir(name)
