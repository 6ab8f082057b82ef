"""A storage reader for stock `torch.distributed.checkpoint`: large parallel reads, verified, and nothing is unpickled freely.

Runs in: the thread that stock DCP calls from; threads of its own end before a call returns.
"""

import io
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import (
    Metadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from backstay.catalog import Entry, find_hash_problem, shorten
from backstay.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidArgument,
)
from backstay.frames import object_frame
from backstay.interop.arguments import check_num_threads, is_local, local_path
from backstay.load.locate import WEIGHTS_DIR, Place
from backstay.load.metadata import METADATA_NAME, read_metadata
from backstay.load.read_item import find_info, plan_read
from backstay.load.reader import read_slices, read_tensors
from backstay.load.stored import parse_object
from backstay.manifest import MANIFEST_NAME, Manifest

log = logging.getLogger("backstay")


class BackstayReader(StorageReader):
    """Reads checkpoints of Backstay and of stock DCP in large ranges, in parallel, straight into the tensors to be loaded.

        dcp.load(state_dict, storage_reader=BackstayReader("runs/7/step-00000100"))

    Unlike stock DCP's own reader, it runs no code that a checkpoint brings along: metadata and objects may hold plain values, tensors and
    what `torch.serialization.add_safe_globals` admits. Errors are raised on all ranks as `CheckpointException`, which holds those below
    in `failures`; of a checkpoint whose metadata cannot be read, stock DCP makes an `AssertionError` with the same words. A load that
    fails while it reads leaves the state partly loaded.

    Args:
        path: the directory of a checkpoint, or its `weights`; the same on all ranks.
        verify: against the manifest, where there is one. "size": all files are there with their exact sizes. "full": their hashes fit as
            well; the ranks share the reading.
        num_threads: parallel reads per rank.

    Raises:
        InvalidArgument: a URL, another `verify`, no threads; at a load, a checkpoint written with extensions.
        CheckpointNotFound: at a load, no checkpoint is at `path`.
        CorruptCheckpoint: at a load, it was never committed, is not what it says it is, or asks for code.
        StateMismatch: at a load, a tensor of the state has another shape than the planner asked for.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Literal["size", "full"] = "size",
        num_threads: int = 4,
    ) -> None:
        super().__init__()
        check_num_threads(num_threads)
        if verify not in ("size", "full"):
            raise InvalidArgument(f"verify={verify!r}: expected 'size' or 'full'")
        self.path = local_path(path)
        self.verify = verify
        self.num_threads = num_threads
        self._place: Place | None = None
        self._metadata: Metadata | None = None

    @property
    def checkpoint_id(self) -> Path:
        """The path, by the name that stock DCP logs it under."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another load begins, from `checkpoint_id` if that is given."""
        if checkpoint_id is not None:
            self.path = local_path(checkpoint_id)
        self._place = self._metadata = None

    # Without **kwargs, stock DCP does not ask a second time for metadata of one rank, which we never write.
    def read_metadata(self) -> Metadata:
        """See `StorageReader`; read with an unpickler that admits DCP's metadata types only."""
        self._place = find_place(self.path)
        return read_metadata(self._place.weights)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the metadata; the coordinator holds the files against the manifest."""
        self._metadata = metadata
        place = self._place
        assert place is not None, "stock DCP calls read_metadata before set_up_storage_reader"
        if not is_coordinator:
            return
        if place.manifest is not None:
            entry = Entry(step=place.step, path=place.path, manifest=place.manifest)
            raise_problems(place, entry.problems())
        elif self.verify == "full":
            log.warning("%s has no %s: there are no hashes to verify", self.path, MANIFEST_NAME)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`; nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Share the files to be verified among the ranks."""
        return [
            replace(plan, storage_data=Share(rank, len(plans))) for rank, plan in enumerate(plans)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify this rank's share, read objects and tensors, and hand them to the planner."""
        place = self._place
        assert place is not None, "stock DCP calls read_metadata before read_data"
        assert self._metadata is not None, "stock DCP calls set_up_storage_reader before read_data"
        if self.verify == "full" and place.manifest is not None:
            share = plan.storage_data if isinstance(plan.storage_data, Share) else Share(0, 1)
            files = place.manifest.files[share.first :: share.step]
            found = [find_hash_problem(place.path, file) for file in files]
            raise_problems(place, filter(None, found))
        # Objects first: what is refused is refused before any tensor is changed.
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        frames = read_frames(place.weights, self._metadata, objects)
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        reads = [plan_read(item, self._metadata, planner) for item in tensors]
        read_tensors(place.weights, reads, num_threads=self.num_threads)
        for item, read in zip(tensors, reads, strict=True):
            planner.commit_tensor(item, read.target)
        for item, frame in zip(objects, frames, strict=True):
            planner.load_bytes(item, io.BytesIO(frame))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a local path."""
        return is_local(checkpoint_id)


# Reading ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """Which files of the manifest a rank verifies: every `step`-th from the `first` on."""

    first: int
    step: int


def find_place(path: Path) -> Place:
    """Where the files of a checkpoint are, and its manifest if it has one.

    Raises:
        CheckpointNotFound: there is none.
        CorruptCheckpoint: it was never committed, or its manifest cannot be used.
    """
    if (path / METADATA_NAME).exists():
        is_part = path.name == WEIGHTS_DIR and not (path / MANIFEST_NAME).exists()
        above = path.parent if is_part and (path.parent / MANIFEST_NAME).exists() else path
        return Place(above, path, read_manifest(above))
    weights = path / WEIGHTS_DIR
    if not (weights / METADATA_NAME).exists():
        raise CheckpointNotFound(
            f"{path}: expected a checkpoint, with {METADATA_NAME} in it or in its {WEIGHTS_DIR}; found none"
        )
    manifest = read_manifest(path)
    if manifest is None:
        raise CorruptCheckpoint(f"{path} was never committed: it has no {MANIFEST_NAME}")
    return Place(path, weights, manifest)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in a directory, None if there is none."""
    path = directory / MANIFEST_NAME
    return Manifest.from_json(path.read_bytes(), source=str(path)) if path.exists() else None


def raise_problems(place: Place, problems: Iterable[str]) -> None:
    """Raise CorruptCheckpoint if there are any."""
    if found := [*problems]:
        raise CorruptCheckpoint(f"{place.path}: {shorten(found)}. Use another checkpoint")


def read_frames(directory: Path, metadata: Metadata, items: Sequence[ReadItem]) -> list[bytes]:
    """Frames of objects that any planner may load.

    Planners unpickle freely what they are given. So they are given frames of our own, made from the values that torch's restricted
    unpickler found; then it does not matter whether two unpicklers understand foreign bytes in the same way.

    Raises:
        CorruptCheckpoint: an object is more than plain values.
    """
    places = [find_info(item, metadata) for item in items]
    frames = read_slices(
        directory, [(place.relative_path, place.offset, place.length) for place in places]
    )
    known: dict[bytes, bytes] = {}
    for item, frame in zip(items, frames, strict=True):
        if frame not in known:
            source = f"{directory}: {item.storage_index.fqn}"
            known[frame] = object_frame(parse_object(frame, source))
    return [known[frame] for frame in frames]
