"""From the ranks' done records to a published checkpoint, and how the other ranks learn the outcome.

Runs in: the writers; `publish_attempt` in rank 0's only. Guarantees: a directory gets its final name only with every rank's files
complete and the manifest inside, all durable; an attempt has one outcome, the same for all ranks. Only rank 0's word counts (its
`committed` file, or a failed record) while its writer lives; after its death the final directory does.
"""

import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backstay import points
from backstay.attempts import (
    COMMITTED_NAME,
    DoneRecord,
    Failure,
    attempt_dir,
    is_committed,
    leftover_name,
    put_committed,
    read_done,
    read_failure,
    read_lock,
    recorded_ranks,
    step_dir_name,
)
from backstay.errors import CorruptCheckpoint, SaveFailed, StepExists
from backstay.manifest import MANIFEST_NAME, FileRecord, Manifest
from backstay.save.assemble import Recipe, assemble
from backstay.save.messages import FileSource
from backstay.storage.base import Storage

FIRST_PAUSE_S = 0.005
LONGEST_PAUSE_S = 0.1
# Looking at locks opens a file per missing rank; records alone are one directory listing.
LOCK_CHECK_S = 0.25


class AttemptFailed(SaveFailed):
    """Ends the work for an attempt; the failure says where and why, `is_recorded` whether other ranks can read it already."""

    def __init__(self, failure: Failure, *, is_recorded: bool) -> None:
        super().__init__(failure.cause)
        self.failure = failure
        self.is_recorded = is_recorded


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt as all parts of a writer name it."""

    root: Path
    name: str
    step: int

    @property
    def directory(self) -> str:
        """Where its files are written, relative to the root."""
        return leftover_name(self.step, "incomplete", self.name)

    @property
    def final_directory(self) -> str:
        """The name that makes it a checkpoint."""
        return step_dir_name(self.step)


@dataclass(frozen=True, kw_only=True)
class Publication:
    """What rank 0's writer adds to the ranks' files.

    Attributes:
        images: descriptors by image id, with the bytes of `metadata`.
        fields: of the manifest, as the trainer knows them.
        run_id: goes into the manifest.
        recipes: of files put together from those of the ranks.
        chunk_bytes: unit of their hashing.
        throttle: called with a number of bytes before they are written.
    """

    images: Mapping[int, int]
    metadata: Sequence[FileSource]
    fields: dict[str, object]
    run_id: str
    recipes: Sequence[Recipe] = ()
    chunk_bytes: int = 4 << 20
    throttle: Callable[[int], None] = lambda num_bytes: None


def await_done(attempt: Attempt, *, world_size: int, limit_s: float) -> list[DoneRecord]:
    """Wait for every rank's done record.

    Raises:
        AttemptFailed: a rank failed, a rank's writer died, or some ranks did not finish within `limit_s` seconds.
    """
    patience = Patience(limit_s)
    records: dict[int, DoneRecord] = {}
    while True:
        raise_recorded_failure(attempt)
        for rank in recorded_ranks(attempt.root, attempt.name, "done") - records.keys():
            records[rank] = read_done(attempt.root, attempt.name, rank)
        missing = [rank for rank in range(world_size) if rank not in records]
        if not missing:
            return [records[rank] for rank in range(world_size)]
        if patience.is_over():
            cause = f"ranks {name_ranks(missing)} of {world_size} did not finish writing within {limit_s} s"
            raise AttemptFailed(
                Failure(rank=missing[0], kind="CommitTimeout", cause=cause), is_recorded=False
            )
        if patience.may_look_at_locks():
            for rank in missing:
                raise_if_dead(attempt, rank)
        patience.pause()


def await_outcome(attempt: Attempt, *, limit_s: float) -> None:
    """On a rank that does not commit: wait until the attempt is published.

    Raises:
        AttemptFailed: it was not.
    """
    patience = Patience(limit_s)
    try:
        while not (attempt_dir(attempt.root, attempt.name) / COMMITTED_NAME).exists():
            raise_recorded_failure(attempt)
            if patience.is_over():
                cause = f"rank 0 did not commit within {limit_s} s"
                raise AttemptFailed(
                    Failure(rank=0, kind="CommitTimeout", cause=cause), is_recorded=False
                )
            if patience.may_look_at_locks():
                raise_if_dead(attempt, 0)
            patience.pause()
    except AttemptFailed:
        # Rank 0's writer may have died, or stalled, between publishing and saying so.
        if not is_committed(attempt.root, attempt.name, attempt.step):
            raise


def raise_recorded_failure(attempt: Attempt) -> None:
    """Raise AttemptFailed if some rank recorded a failure or the attempt's directory is gone."""
    try:
        failure = read_failure(attempt.root, attempt.name)
    except FileNotFoundError:
        cause = (
            f"{attempt_dir(attempt.root, attempt.name)} was removed while the save was under way"
        )
        raise AttemptFailed(
            Failure(rank=0, kind="SaveFailed", cause=cause), is_recorded=True
        ) from None
    if failure is not None:
        raise AttemptFailed(failure, is_recorded=True)


def raise_if_dead(attempt: Attempt, rank: int) -> None:
    """Raise AttemptFailed if a rank's writer died before its part was over: its lock is free, and it left no word."""
    lock = read_lock(attempt.root, attempt.name, rank)
    if lock is None or lock.is_held or not lock.is_here:
        return
    raise_recorded_failure(attempt)
    last_word = COMMITTED_NAME if rank == 0 else f"rank-{rank:05d}.done"
    if not (attempt_dir(attempt.root, attempt.name) / last_word).exists():
        cause = f"the writer of rank {rank} (pid {lock.pid}) died"
        raise AttemptFailed(Failure(rank=rank, kind="WriterDied", cause=cause), is_recorded=False)


def publish_attempt(
    storage: Storage, attempt: Attempt, records: Sequence[DoneRecord], publication: Publication
) -> tuple[Manifest, list[str]]:
    """Write `.metadata` and the manifest, give the directory its final name, and say so to the other ranks.

    Returns:
        The manifest, and lines for the log.

    Raises:
        StepExists: a whole checkpoint of that step is there.
        OSError: something could not be written; nothing is published then.
        AttemptFailed: a rank failed after all.
    """
    check_complete(storage, attempt, records)
    points.reach("commit.metadata")
    metadata = [
        write_metadata(storage, attempt, source, publication.images)
        for source in publication.metadata
    ]
    extra = write_assembled(storage, attempt, publication)
    points.reach("commit.manifest")
    files = [file for record in records for file in record.files] + metadata + extra
    manifest = make_manifest(attempt, files, publication)
    storage.put(f"{attempt.directory}/{MANIFEST_NAME}", manifest.to_json())
    for directory in directories(files):
        storage.sync_dir(f"{attempt.directory}/{directory}")
    points.reach("commit.rename")
    notes = make_way(storage, attempt)
    raise_recorded_failure(attempt)
    notes += publish_or_take_back(storage, attempt)
    try:
        put_committed(attempt.root, attempt.name)
    except OSError as error:
        notes.append(
            f"step {attempt.step} is committed, but the other ranks learn it late: {error}"
        )
    return manifest, notes


def check_complete(storage: Storage, attempt: Attempt, records: Sequence[DoneRecord]) -> None:
    """Every recorded file must be visible from here, once, with its size: ranks may see different file systems."""
    owner: dict[str, int] = {}
    for record in records:
        for file in record.files:
            if file.path in owner:
                raise SaveFailed(
                    f"ranks {owner[file.path]} and {record.rank} both wrote {file.path}"
                )
            owner[file.path] = record.rank
            try:
                size = storage.size(f"{attempt.directory}/{file.path}")
            except FileNotFoundError:
                raise SaveFailed(
                    f"{file.path} of rank {record.rank} (on {record.host}) cannot be seen by rank 0: is the root shared?"
                ) from None
            if size != file.num_bytes:
                raise SaveFailed(
                    f"{file.path} of rank {record.rank} has {size} bytes, its writer says {file.num_bytes}"
                )


def write_metadata(
    storage: Storage, attempt: Attempt, source: FileSource, images: Mapping[int, int]
) -> FileRecord:
    """Write one file of rank 0 that must come after all data, of which there may be none."""
    storage.make_dir(posixpath.dirname(f"{attempt.directory}/{source.path}"))
    record, _ = storage.write_image(
        f"{attempt.directory}/{source.path}",
        image_fd=images[source.image_id],
        offset=source.offset,
        num_bytes=source.num_bytes,
        role=source.role,
    )
    return replace(record, path=source.path)


def write_assembled(
    storage: Storage, attempt: Attempt, publication: Publication
) -> list[FileRecord]:
    """Put files together from those that all ranks wrote."""
    records = []
    for recipe in publication.recipes:
        storage.make_dir(posixpath.dirname(f"{attempt.directory}/{recipe.path}"))
        records.append(
            assemble(
                attempt.root / attempt.directory,
                recipe,
                chunk_bytes=publication.chunk_bytes,
                throttle=publication.throttle,
            )
        )
    return records


def make_manifest(
    attempt: Attempt, files: Sequence[FileRecord], publication: Publication
) -> Manifest:
    """The manifest from what the trainer knows and what the writers found."""
    known = dict(publication.fields)
    known["tags"] = tuple(known.get("tags") or ())  # type: ignore[arg-type]
    return Manifest(
        step=attempt.step,
        run_id=publication.run_id,
        attempt=attempt.name,
        created=time.time(),
        files=tuple(sorted(files, key=lambda file: file.path)),
        **known,  # type: ignore[arg-type]
    )


def directories(files: Sequence[FileRecord]) -> list[str]:
    """Directories of the files and those above them, innermost first; "" is the checkpoint's own."""
    found = {""}
    for file in files:
        parts = file.path.split("/")[:-1]
        found |= {"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return sorted(found, reverse=True)


def make_way(storage: Storage, attempt: Attempt) -> list[str]:
    """See to it that the final name is free: a whole checkpoint is never overwritten, a damaged one is set aside."""
    name = attempt.final_directory
    if not storage.exists(name):
        return []
    problem = find_problem(storage, name)
    if problem is None:
        raise StepExists(
            f"{attempt.root / name} is there already and whole; a checkpoint is never overwritten"
        )
    aside = leftover_name(attempt.step, "damaged", attempt.name)
    storage.rename(name, aside)
    return [f"{name} was not a whole checkpoint ({problem}); it was set aside as {aside}"]


def find_problem(storage: Storage, name: str) -> str | None:
    """Why a directory is not a whole checkpoint, None if it is one."""
    try:
        manifest = Manifest.from_json(storage.read(f"{name}/{MANIFEST_NAME}"), source=MANIFEST_NAME)
        for file in manifest.files:
            size = storage.size(f"{name}/{file.path}")
            if size != file.num_bytes:
                return f"{file.path} has {size} bytes, expected {file.num_bytes}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (CorruptCheckpoint, NotADirectoryError) as error:
        return str(error)
    return None


def publish_or_take_back(storage: Storage, attempt: Attempt) -> list[str]:
    """Publish; if its durability cannot be had, take the name back, so that failure means "not published"."""
    try:
        storage.publish(attempt.directory, attempt.final_directory)
    except OSError as error:
        if not storage.exists(attempt.final_directory) or storage.exists(attempt.directory):
            raise
        try:
            storage.rename(attempt.final_directory, attempt.directory)
        except OSError:
            if storage.exists(attempt.directory):
                raise error from None
            return [
                f"{attempt.final_directory} is published, but might not survive a power cut: {error}"
            ]
        raise
    return []


def name_ranks(ranks: Sequence[int]) -> str:
    """A few ranks in words, however many there are."""
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


class Patience:
    """The rhythm of a wait on other ranks' files: often at first, seldom later, not for ever."""

    def __init__(self, limit_s: float) -> None:
        self._deadline = time.monotonic() + limit_s
        self._locks_at = time.monotonic() + LOCK_CHECK_S
        self._pause_s = FIRST_PAUSE_S

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._deadline

    def may_look_at_locks(self) -> bool:
        """Whether it is time again for the dearer look at locks."""
        if time.monotonic() < self._locks_at:
            return False
        self._locks_at = time.monotonic() + LOCK_CHECK_S
        return True

    def pause(self) -> None:
        """Sleep a little."""
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, LONGEST_PAUSE_S)
