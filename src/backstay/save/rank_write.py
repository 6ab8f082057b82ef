"""One rank's part of a save: its files written or linked, then its done record.

Runs in: the writer. Guarantees: a done record means that all files of this rank, and their names, are durable.
"""

import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from backstay import points
from backstay.attempts import DoneRecord, host_identity, put_done, read_failure
from backstay.errors import SaveFailed
from backstay.manifest import MANIFEST_NAME, FileRecord, Manifest
from backstay.save.commit import AttemptFailed
from backstay.save.messages import FileSource
from backstay.save.slots import write_slot
from backstay.storage.base import Storage, WriteStats

NO_STATS = WriteStats(num_bytes=0, seconds=0.0, hash_seconds=0.0, cpu_seconds=0.0, direct=True)


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank has to write for one attempt.

    Attributes:
        directory: of the attempt's files, relative to the storage's root.
        images: descriptors by image id; -1 is the side image.
        write_slots: see `WriterConfig`.
        limit_s: how long to wait for a slot.
    """

    root: Path
    attempt: str
    rank: int
    directory: str
    files: Sequence[FileSource]
    images: Mapping[int, int]
    write_slots: int
    limit_s: float


def write_part(storage: Storage, part: RankPart) -> DoneRecord:
    """Write or link all files of the part and record that.

    Raises:
        OSError: something could not be written.
        AttemptFailed: another rank failed meanwhile.
    """
    began = time.monotonic()

    def watch() -> None:
        failure = read_failure(part.root, part.attempt)
        if failure is not None:
            raise AttemptFailed(failure, is_recorded=True)

    for directory in parents(part):
        storage.make_dir(directory)
    with write_slot(part.write_slots, limit_s=part.limit_s, watch=watch):
        results = [write_file(storage, part, source, watch) for source in part.files]
    for directory in parents(part):
        storage.sync_dir(directory)
    stats = [stats for _, stats in results]
    record = DoneRecord(
        rank=part.rank,
        host=host_identity(),
        files=tuple(record for record, _ in results),
        seconds=time.monotonic() - began,
        hash_seconds=sum(one.hash_seconds for one in stats),
        cpu_seconds=sum(one.cpu_seconds for one in stats),
        direct=all(one.direct for one in stats),
    )
    points.reach("write.done_record")
    put_done(part.root, part.attempt, record)
    return record


def parents(part: RankPart) -> list[str]:
    """The directories of the part's files."""
    return sorted(
        {posixpath.dirname(f"{part.directory}/{source.path}") for source in part.files}
        | {part.directory}
    )


def write_file(
    storage: Storage, part: RankPart, source: FileSource, watch: Callable[[], None]
) -> tuple[FileRecord, WriteStats]:
    """Write or link one file."""
    watch()
    target = f"{part.directory}/{source.path}"
    if source.link_from is not None:
        record = source.record or recorded(storage, source.link_from)
        check_link(storage, source, record)
        storage.link(source.link_from, target)
        return replace(record, path=source.path, role=source.role), NO_STATS
    record, stats = storage.write_image(
        target,
        image_fd=part.images[source.image_id],
        offset=source.offset,
        num_bytes=source.num_bytes,
        role=source.role,
        watch=watch,
    )
    return replace(record, path=source.path), stats


def recorded(storage: Storage, path: str) -> FileRecord:
    """The record of a committed file, from the manifest beside it."""
    step_dir, _, inner = path.partition("/")
    manifest = Manifest.from_json(storage.read(f"{step_dir}/{MANIFEST_NAME}"), source=step_dir)
    for file in manifest.files:
        if file.path == inner:
            return file
    raise SaveFailed(f"cannot link {path}: the manifest of {step_dir} has no such file")


def check_link(storage: Storage, source: FileSource, record: FileRecord) -> None:
    """A linked file must be what the trainer thinks it is."""
    size = storage.size(str(source.link_from))
    if not size == record.num_bytes == source.num_bytes:
        raise SaveFailed(
            f"cannot link {source.link_from}: it has {size} bytes, its record says {record.num_bytes}, "
            f"the trainer expected {source.num_bytes}"
        )


def trainable_digest(files: Sequence[FileRecord]) -> str:
    """Hash over the hashes of the trainable files; "" if there are none."""
    trainable = sorted(
        (file for file in files if file.role == "trainable"), key=lambda file: file.path
    )
    if not trainable:
        return ""
    hasher = xxhash.xxh3_128()
    for file in trainable:
        hasher.update(
            f"{file.path}\n{file.num_bytes}\n{file.chunk_bytes}\n{' '.join(file.chunk_hashes)}\n".encode()
        )
    return hasher.hexdigest()
