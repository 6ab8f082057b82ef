"""Files of a checkpoint put together from tensors that its data files hold already: the recipe's plain form, and the copying.

Runs in: rank 0's writer, once every rank's data files are durable. Guarantees: a file that was recorded is durable, its name once its
directory is synced. No torch. Ranges are copied, not shared between files: tensors lie at multiples of 64 bytes, and file systems can
share whole blocks only.
"""

import base64
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from backstay.manifest import FileRecord


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One file.

    Attributes:
        path: relative to the checkpoint's directory.
        head: bytes that it begins with, in base64.
        ranges: what follows: path below the checkpoint's directory, offset and size in bytes.
    """

    path: str
    head: str
    ranges: tuple[tuple[str, int, int], ...] = ()


def encode_recipes(recipes: Sequence[Recipe]) -> bytes:
    """As they travel to the writer; nothing if there are none."""
    return json.dumps([asdict(recipe) for recipe in recipes]).encode() if recipes else b""


def decode_recipes(data: bytes) -> list[Recipe]:
    """The inverse of `encode_recipes`."""
    if not data:
        return []
    return [
        Recipe(path=one["path"], head=one["head"], ranges=tuple(map(tuple, one["ranges"])))
        for one in json.loads(data)
    ]


def assemble(
    directory: Path, recipe: Recipe, *, chunk_bytes: int, throttle: Callable[[int], None]
) -> FileRecord:
    """Write one file durably, hashing on the way.

    Args:
        directory: of the checkpoint's files; that of the new file must exist.
        throttle: called with a number of bytes before they are written.

    Raises:
        OSError: a source is missing or shorter than the recipe says, or the file could not be written.
    """
    hashes: list[str] = []
    num_bytes, in_chunk, hasher = 0, 0, xxhash.xxh3_64()
    with (directory / recipe.path).open("wb") as file:
        for data in read_pieces(directory, recipe, chunk_bytes):
            view = memoryview(data)
            throttle(len(view))
            file.write(view)
            num_bytes += len(view)
            while view:
                part = view[: chunk_bytes - in_chunk]
                hasher.update(part)
                in_chunk += len(part)
                view = view[len(part) :]
                if in_chunk == chunk_bytes:
                    hashes.append(hasher.hexdigest())
                    in_chunk, hasher = 0, xxhash.xxh3_64()
        file.flush()
        os.fsync(file.fileno())
    if in_chunk:
        hashes.append(hasher.hexdigest())
    return FileRecord(
        path=recipe.path,
        num_bytes=num_bytes,
        chunk_bytes=chunk_bytes,
        chunk_hashes=tuple(hashes),
        role="assembled",
    )


def read_pieces(directory: Path, recipe: Recipe, most_bytes: int) -> Iterator[bytes]:
    """The file's content in order, in pieces of at most `most_bytes` (but for the head)."""
    yield base64.b64decode(recipe.head)
    fds: dict[str, int] = {}
    try:
        for name, offset, size in recipe.ranges:
            if name not in fds:
                fds[name] = os.open(directory / name, os.O_RDONLY | os.O_CLOEXEC)
            end = offset + size
            while offset < end:
                data = os.pread(fds[name], min(end - offset, most_bytes), offset)
                if not data:
                    raise OSError(
                        errno.EIO,
                        f"ends at {offset}, expected bytes up to {end}",
                        str(directory / name),
                    )
                offset += len(data)
                yield data
    finally:
        for fd in fds.values():
            os.close(fd)
