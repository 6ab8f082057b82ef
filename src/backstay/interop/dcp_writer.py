"""A storage writer for stock `torch.distributed.checkpoint`: past the page cache, hashed, durable, visible all at once or not at all.

Runs in: whatever thread or process stock DCP calls from; threads of its own end before a call returns. Guarantees: between calls it holds
plain values only, so that it can be pickled; a name is published only when every planned item of every rank is durable under it.
Assumes: all ranks see one file system; a writer serves one save at a time.
"""

import io
import logging
import os
import pickle
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from backstay import points
from backstay.attempts import is_live, parse_step
from backstay.checkpointer import versions
from backstay.errors import (
    InvalidArgument,
    RanksDisagree,
    SaveFailed,
    StateError,
    StepExists,
)
from backstay.frames import object_frame
from backstay.interop.arguments import check_num_threads, is_local, local_path
from backstay.load.metadata import METADATA_NAME
from backstay.manifest import MANIFEST_NAME, FileRecord, Manifest
from backstay.save.image import FileImage
from backstay.save.layout import PAGE_BYTES, TRAINED, Piece, file_name, make_layout, stored_form
from backstay.save.retention import delete_tree
from backstay.state import find_unstorable, is_opaque
from backstay.storage.base import Storage
from backstay.storage.local import LocalStorage

log = logging.getLogger("backstay")


class BackstayWriter(StorageWriter):
    """Writes what stock DCP saves: past the page cache, hashed, durable, and visible all at once or not at all.

    Every rank copies its part into memory once more, as the exact image of its file, and writes that in `<path>.incomplete-<attempt>`; the
    coordinator adds `.metadata` and `manifest.json` and gives the directory its name. Stock `dcp.load`, `BackstayReader` and
    `backstay.restore(path, ..., only=("model", "optimizer"))` read it. If `path` is `<root>/step-<number>`, `Catalog(root)` lists it.

        dcp.save(state_dict, storage_writer=BackstayWriter("runs/7/step-00000100"))

    As of stock DCP, an error on any rank is raised on all as `CheckpointException`, which holds the errors below in `failures`. What a
    failed save left is removed by the next one to the same path.

    Args:
        path: of the checkpoint, which must not exist; the same on all ranks, on a file system that all of them see.
        num_threads: parallel writes per rank.
        chunk_bytes: unit of hashing and writing; a multiple of 4096.

    Raises:
        InvalidArgument: a URL, no threads, another unit; at a save, plan caching or `use_collectives=False`.
        StepExists: at a save, something is at `path` already; nothing was written.
        RanksDisagree: at a save, ranks have different paths; nothing was written.
        StateError: at a save, a tensor cannot be stored.
        SaveFailed, OSError: at a save, not everything that was planned was written; nothing is published.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        num_threads: int = 4,
        chunk_bytes: int = 8 << 20,
    ) -> None:
        super().__init__()
        check_num_threads(num_threads)
        if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
            raise InvalidArgument(
                f"chunk_bytes={chunk_bytes}: expected a multiple of {PAGE_BYTES}, such as 8 << 20"
            )
        self.path = local_path(path)
        self.num_threads = num_threads
        self.chunk_bytes = chunk_bytes
        self._attempt: Attempt | None = None

    @property
    def checkpoint_id(self) -> Path:
        """The path, by the name that stock DCP logs it under."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another checkpoint begins, at `checkpoint_id` if that is given."""
        if checkpoint_id is not None:
            self.path = local_path(checkpoint_id)
        self._attempt = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter`; nothing is kept."""
        if not kwargs.get("use_collectives", True):
            raise InvalidArgument(
                "use_collectives=False makes each rank publish for itself; expected True, so that a checkpoint is whole or not there"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """See that the path is free, and tell the coordinator which one this rank means."""
        check_free(self.path)
        return replace(plan, storage_data=str(self.path))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt: clear what earlier ones left, make its directory, and give each rank its file."""
        check_plans(self.path, plans)
        attempt = Attempt(
            path=self.path,
            name=uuid.uuid4().hex,
            num_items=tuple(len(plan.items) for plan in plans),
        )
        storage = self._open(attempt.path.parent)
        clear_leftovers(storage, attempt.path.name)
        storage.make_dir(attempt.directory)
        self._attempt = attempt
        return [
            replace(
                plan,
                storage_data=Part(storage.root, attempt.directory, file_name(rank, TRAINED)),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; it is durable when this returns."""
        part = plan.storage_data
        if not isinstance(part, Part) or getattr(planner, "_enable_plan_caching", False):
            raise InvalidArgument(
                "plan caching would write to the attempt of an earlier save; expected enable_plan_caching=False"
            )
        storage = self._open(part.root)
        if not storage.is_dir(part.directory):
            raise SaveFailed(
                f"{part.root / part.directory}, made by the coordinator, cannot be seen here: is the path on a shared file system?"
            )
        future: Future[list[WriteResult]] = Future()
        future.set_result([*write_part(storage, part, plan.items, planner)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once all ranks have written: complete the checkpoint and publish it."""
        attempt = self._attempt
        assert attempt is not None, "stock DCP calls prepare_global_plan before finish"
        storage = self._open(attempt.path.parent)
        files = check_written(storage, attempt, results)
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = self.storage_meta()
        metadata.storage_data = {item.index: item.storage_data for row in results for item in row}
        points.reach("commit.metadata")
        files.append(write_metadata(storage, attempt, pickle.dumps(metadata)))
        points.reach("commit.manifest")
        manifest = make_manifest(attempt, files)
        storage.put(f"{attempt.directory}/{MANIFEST_NAME}", manifest)
        points.reach("commit.rename")
        publish(storage, attempt, manifest)

    def storage_meta(self) -> StorageMeta:
        """What stock DCP's planners are told of the storage."""
        return StorageMeta(checkpoint_id=str(self.path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a local path."""
        return is_local(checkpoint_id)

    def _open(self, root: Path) -> LocalStorage:
        """Made anew in each call: a storage has a lock, which cannot be pickled."""
        return LocalStorage(
            root=root,
            num_threads=self.num_threads,
            chunk_bytes=self.chunk_bytes,
            on_note=log.info,
        )


# Writing: the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt to write the checkpoint at `path`; `num_items` is what each rank has to write."""

    path: Path
    name: str
    num_items: tuple[int, ...]

    @property
    def directory(self) -> str:
        """Where its files are written, beside `path`.

        The attempt's name is not of the form of a `Checkpointer`'s, so that no retention takes this directory for one of its own dead ones.
        """
        return f"{self.path.name}.incomplete-{self.name}"


@dataclass(frozen=True)
class Part:
    """The file that a rank has to write, in the directory of the attempt, which is under `root`."""

    root: Path
    directory: str
    file: str


@dataclass(frozen=True)
class Written(WriteResult):
    """Where an item is, with the record of the file that it is in."""

    record: FileRecord


def check_free(path: Path) -> None:
    """Raise StepExists if anything is there."""
    if os.path.lexists(path):
        raise StepExists(
            f"{path} is there already, and a checkpoint is never overwritten: choose another path, or remove it"
        )


def check_plans(path: Path, plans: Sequence[SavePlan]) -> None:
    """Raise where the ranks' plans cannot make one checkpoint."""
    # A planner that makes plans of its own may lose what we added; then nothing is known.
    paths = [path if plan.storage_data is None else plan.storage_data for plan in plans]
    for rank, other in enumerate(paths):
        if str(other) != str(path):
            raise RanksDisagree(f"rank {rank} saves to {other}, the coordinator to {path}")
    if not all(plan.usable for plan in plans):
        raise InvalidArgument("plan caching is not supported; expected enable_plan_caching=False")


def clear_leftovers(storage: LocalStorage, name: str) -> None:
    """Remove what attempts at this very path left; what cannot be removed is no reason to fail."""
    prefix = f"{name}.incomplete-"
    for leftover in storage.list_names(""):
        if not leftover.startswith(prefix) or not storage.is_dir(leftover):
            continue
        if is_live(storage.root, leftover.removeprefix(prefix)):
            continue  # writers of a `Checkpointer` are at work for the same step
        # Under its own name it could be published by a process that is not as dead as it seems, half deleted.
        doomed = f"{prefix}discarded-{uuid.uuid4().hex}"
        try:
            storage.rename(leftover, doomed)
            delete_tree(storage, doomed)
        except OSError as error:
            log.warning("could not remove %s, left by a failed save: %s", leftover, error)


# Writing: one rank's file ----------------------------------------------------------------------------------------------


def write_part(
    storage: Storage, part: Part, items: Sequence[WriteItem], planner: SavePlanner
) -> list[Written]:
    """Lay out the items, copy their values into an image, and write it."""
    if not items:
        return []
    frames = make_frames(items, planner)
    slots: dict[str, int] = {}
    for index, frame in frames.items():
        slots[index.fqn] = max(len(frame), slots.get(index.fqn, 0))
    layout = make_layout(items, frozen=frozenset(), slots=slots)
    with closing(FileImage(layout.num_bytes)) as image:
        for item, piece in zip(items, layout.pieces, strict=True):
            if piece.dtype is None:
                image.put(piece.offset, frames[item.index])
            else:
                copy_tensor(image, piece, resolve_tensor(item, planner))
        record, _ = storage.write_image(
            f"{part.directory}/{part.file}",
            image_fd=image.fd,
            offset=0,
            num_bytes=layout.num_bytes,
            role="trainable",
        )
    record = replace(record, path=part.file)
    return [
        Written(
            index=item.index,
            size_in_bytes=piece.num_bytes,
            storage_data=_StorageInfo(part.file, piece.offset, piece.num_bytes),
            record=record,
        )
        for item, piece in zip(items, layout.pieces, strict=True)
    ]


def make_frames(items: Sequence[WriteItem], planner: SavePlanner) -> dict[MetadataIndex, bytes]:
    """The whole frames of objects and of tensors whose class, not their memory, says what they hold.

    Plain tensors are looked at and let go, to be resolved again when their turn comes: a planner may have to make them.
    """
    frames = {}
    for item in items:
        if item.type == WriteItemType.BYTE_IO:
            value = planner.resolve_data(item)
            assert isinstance(value, io.BytesIO), "DCP's planners give objects as bytes"
            frames[item.index] = value.getvalue()
        elif is_opaque(tensor := resolve_tensor(item, planner)):
            frames[item.index] = object_frame(tensor.cpu())
    return frames


def resolve_tensor(item: WriteItem, planner: SavePlanner) -> Tensor:
    """The tensor of an item, which must be what the plan says."""
    name = item.index.fqn
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor), "DCP's planners give tensors as tensors"
    problem = find_unstorable([(name, tensor)])
    if problem is not None:
        raise StateError(problem)
    dtype, shape = stored_form(item)
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
        raise StateError(
            f"{name}: expected {dtype} of shape {shape} as planned, the planner gave {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor.detach()


def copy_tensor(image: FileImage, piece: Piece, tensor: Tensor) -> None:
    """Put a plain tensor's frame into the image."""
    frame = piece.frame
    image.put(piece.offset, frame.head)
    image.put(piece.data_offset + frame.data_bytes, frame.tail)
    image.view(piece.data_offset, tensor.dtype, tuple(tensor.shape)).copy_(tensor)


# Writing: the end, on the coordinator ----------------------------------------------------------------------------------


def check_written(
    storage: Storage, attempt: Attempt, results: Sequence[Sequence[WriteResult]]
) -> list[FileRecord]:
    """The records of all data files, if every planned item is in one and each has its size.

    Raises:
        SaveFailed: something is missing.
    """
    num_written = tuple(len({item.index for item in row}) for row in results)
    if num_written != attempt.num_items:
        raise SaveFailed(
            f"{attempt.path}: the ranks wrote {num_written} items, but {attempt.num_items} were planned; nothing was published"
        )
    records: dict[str, FileRecord] = {}
    for row in results:
        for item in row:
            assert isinstance(item, Written), "results are those of write_data"
            records[item.record.path] = item.record
    for record in records.values():
        check_size(storage, attempt, record)
    return [*records.values()]


def check_size(storage: Storage, attempt: Attempt, record: FileRecord) -> None:
    """Raise SaveFailed if the coordinator does not see a file as the rank that wrote it does."""
    try:
        size = storage.size(f"{attempt.directory}/{record.path}")
    except FileNotFoundError:
        raise SaveFailed(
            f"{record.path} of {attempt.path} cannot be seen by the coordinator: is the path on a shared file system?"
        ) from None
    if size != record.num_bytes:
        raise SaveFailed(
            f"{record.path} of {attempt.path} has {size} bytes, its rank wrote {record.num_bytes}"
        )


def write_metadata(storage: Storage, attempt: Attempt, data: bytes) -> FileRecord:
    """Write `.metadata`, hashed like any other file."""
    with closing(FileImage(len(data))) as image:
        image.put(0, data)
        record, _ = storage.write_image(
            f"{attempt.directory}/{METADATA_NAME}",
            image_fd=image.fd,
            offset=0,
            num_bytes=len(data),
            role="metadata",
        )
    return replace(record, path=METADATA_NAME)


def make_manifest(attempt: Attempt, files: Iterable[FileRecord]) -> bytes:
    """The bytes of `manifest.json`; the run is nobody's, so that no retention counts this checkpoint among its own."""
    return Manifest(
        step=parse_step(attempt.path.name) or 0,
        run_id="",
        attempt=attempt.name,
        world_size=len(attempt.num_items),
        created=time.time(),
        files=tuple(sorted(files, key=lambda file: file.path)),
        versions=versions(),
    ).to_json()


def publish(storage: Storage, attempt: Attempt, manifest: bytes) -> None:
    """Give the directory its final name; if its durability cannot be had, take the name back, so that failure means "not published".

    Raises:
        StepExists: somebody else has published there meanwhile.
        OSError: it could not be done.
    """
    source, target = attempt.directory, attempt.path.name
    check_free(attempt.path)
    try:
        storage.publish(source, target)
    except OSError as error:
        if not holds(storage, target, manifest):
            raise
        with suppress(OSError):
            storage.rename(target, source)
        if not holds(storage, target, manifest):
            raise
        log.warning("%s is published, but might not survive a power cut: %s", attempt.path, error)


def holds(storage: Storage, directory: str, manifest: bytes) -> bool:
    """Whether a directory is the one with this manifest."""
    try:
        return storage.read(f"{directory}/{MANIFEST_NAME}") == manifest
    except OSError:
        return False
