"""Read DCP's `.metadata`, which is a pickle, without letting it run anything.

Only DCP's own metadata types, sizes, dtypes and layouts are admitted; every other global is refused
by name before it is even imported. What comes out is then checked: a checkpoint may come from anywhere.
"""

import io
import pickle
from collections import OrderedDict
from pathlib import Path, PurePosixPath

import torch
from torch.distributed.checkpoint import filesystem, metadata

from backstay.errors import CorruptCheckpoint

METADATA_NAME = ".metadata"
# Everything that the unpickling of hostile bytes with harmless globals may raise.
_UNPICKLING_ERRORS = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    RuntimeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


def _layout(name: str) -> torch.layout:
    """Stands in for torch's private function of the same purpose."""
    layout = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(layout, torch.layout):
        raise ValueError(f"no torch layout {name!r}")  # noqa: TRY004
    return layout


_ADMITTED: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> object:
        admitted = _ADMITTED.get((module_name, global_name))
        if admitted is not None:
            return admitted
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise CorruptCheckpoint(
            f"{METADATA_NAME} asks for {module_name}.{global_name}, which DCP's metadata never needs; "
            "nothing of it was run. Do not use this checkpoint unless you know where it comes from"
        )


def read_metadata(directory: Path) -> metadata.Metadata:
    """Read and check the metadata of a DCP checkpoint, ours or stock.

    Args:
        directory: holds `.metadata` and the data files.

    Raises:
        CorruptCheckpoint: not DCP metadata, or it asks for code, or it points out of `directory`.
        FileNotFoundError: there is no `.metadata`.
    """
    path = directory / METADATA_NAME
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
    except _UNPICKLING_ERRORS as error:
        if isinstance(error, CorruptCheckpoint):
            raise CorruptCheckpoint(f"{path}: {error}") from None
        raise CorruptCheckpoint(f"{path}: not DCP metadata ({error})") from error
    if not isinstance(found, metadata.Metadata):
        raise CorruptCheckpoint(f"{path}: expected DCP metadata, found a {type(found).__name__}")
    _check_entries(found, path)
    _check_places(found, path)
    return found


def _check_entries(found: metadata.Metadata, path: Path) -> None:
    if not isinstance(found.state_dict_metadata, dict):
        raise CorruptCheckpoint(f"{path}: state_dict_metadata is not a dict")
    for key, entry in found.state_dict_metadata.items():
        if isinstance(entry, metadata.BytesStorageMetadata):
            continue
        if not isinstance(entry, metadata.TensorStorageMetadata):
            raise CorruptCheckpoint(f"{path}: {key}: neither a tensor nor bytes")
        for chunk in entry.chunks:
            if not _lies_within(chunk, entry.size):
                raise CorruptCheckpoint(
                    f"{path}: {key}: chunk at {tuple(chunk.offsets)} of {tuple(chunk.sizes)} "
                    f"leaves the tensor's shape {tuple(entry.size)}"
                )


def _lies_within(chunk: metadata.ChunkStorageMetadata, size: torch.Size) -> bool:
    return len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
        offset >= 0 and length >= 0 and offset + length <= whole
        for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )


def _check_places(found: metadata.Metadata, path: Path) -> None:
    if not isinstance(found.storage_data, dict):
        raise CorruptCheckpoint(f"{path}: storage_data is not a dict")
    root = path.parent.resolve()
    checked: set[str] = set()
    for index, info in found.storage_data.items():
        if not isinstance(info, filesystem._StorageInfo):
            raise CorruptCheckpoint(f"{path}: {index}: no place in a file")
        if not _is_count(info.offset) or not _is_count(info.length):
            raise CorruptCheckpoint(f"{path}: {index}: offset {info.offset}, length {info.length}")
        if info.relative_path not in checked:
            _check_inside(root, str(info.relative_path), path)
            checked.add(info.relative_path)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_inside(root: Path, relative: str, path: Path) -> None:
    if not (root / relative).resolve().is_relative_to(root):
        raise CorruptCheckpoint(f"{path}: data file {relative!r} lies outside {root}")
