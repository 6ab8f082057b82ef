"""One read item of DCP's planner -> what to read from which place of which file."""

from collections.abc import Mapping

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from backstay.errors import CorruptCheckpoint, InvalidArgument, StateMismatch
from backstay.load.reader import TensorRead


def plan_read(item: ReadItem, metadata: Metadata, planner: LoadPlanner) -> TensorRead:
    """What to read for an item, into the planner's own tensor."""
    name = item.storage_index.fqn
    info = find_info(item, metadata)
    entry = metadata.state_dict_metadata.get(name)
    if not isinstance(entry, TensorStorageMetadata):
        raise CorruptCheckpoint(f"{name}: the metadata does not say that it is a tensor")
    chunk = find_chunk(item.storage_index, entry)
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise StateMismatch(
            f"{item.dest_index.fqn}: expected a target of shape {tuple(item.lengths)}, the planner gave {tuple(target.shape)}"
        )
    return TensorRead(
        key=name,
        path=info.relative_path,
        offset=info.offset,
        length=info.length,
        dtype=entry.properties.dtype,
        chunk_shape=tuple(chunk.sizes),
        starts=tuple(item.storage_offsets),
        lengths=tuple(item.lengths),
        target=target,
    )


def find_info(item: ReadItem, metadata: Metadata) -> _StorageInfo:
    """Where an item is stored."""
    places: Mapping[MetadataIndex, _StorageInfo] = metadata.storage_data
    info = places.get(item.storage_index)
    if info is None:
        raise CorruptCheckpoint(
            f"the metadata gives no place for {item.storage_index.fqn} at {item.storage_index.offset}"
        )
    if info.transform_descriptors:
        raise InvalidArgument(
            f"{item.storage_index.fqn} went through the extensions {', '.join(info.transform_descriptors)}; expected plain "
            "frames. Load it with torch.distributed.checkpoint.FileSystemReader"
        )
    return info


def find_chunk(index: MetadataIndex, entry: TensorStorageMetadata) -> ChunkStorageMetadata:
    """The chunk of an index: by its number, which is only a hint, or else by its offset."""
    hint = index.index or 0
    chunks = [*entry.chunks[hint : hint + 1], *entry.chunks]
    for chunk in chunks:
        if index.offset is None or tuple(chunk.offsets) == tuple(index.offset):
            return chunk
    raise CorruptCheckpoint(f"{index.fqn}: the metadata has no chunk at {index.offset}")
