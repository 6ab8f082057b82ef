"""Reading ranges of files into given memory: one thread's open file, its scratch and bounce memory, past the page cache or through it.

Runs in: one thread per `Workspace`.
"""

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from backstay.errors import CorruptCheckpoint
from backstay.load.coalesce import MAX_GAP_BYTES, Extent, Range, Sink
from backstay.load.plan import Bytes, FillSink, TensorSink

# O_DIRECT wants offsets, sizes and addresses to be multiples of the device's block.
BLOCK_BYTES = 4096
# Where dtypes of any size may begin in scratch memory.
ALIGNMENT = 64


class Workspace:
    """What one thread reads with: one open file at a time, and memory that it uses again and again."""

    def __init__(self, directory: Path, is_direct: dict[str, bool], bounce_bytes: int = 0) -> None:
        self._directory = directory
        self._is_direct = is_direct
        self._bounce_bytes = bounce_bytes
        self._scratch: Bytes = np.empty(0, np.uint8)
        self._gap: Bytes = np.empty(MAX_GAP_BYTES, np.uint8)
        self._bounce: Bytes | None = None
        self._fd = -1
        self._opened: tuple[str, bool] | None = None

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._opened = None

    def places_for(self, row: Range[TensorSink]) -> list[Bytes]:
        """Where each extent of a range is to be read to: a target, or scratch until the next range."""
        fills = [_first_fill(extent) for extent in row.extents]
        needed = sum(
            _aligned(extent.num_bytes)
            for extent, fill in zip(row.extents, fills, strict=True)
            if fill is None
        )
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, np.uint8)
        places, at = [], 0
        for extent, fill in zip(row.extents, fills, strict=True):
            places.append(self._scratch[at : at + extent.num_bytes] if fill is None else fill)
            at += _aligned(extent.num_bytes) if fill is None else 0
        return places

    def read(self, row: Range[Sink], arrays: Sequence[Bytes]) -> None:
        """Read a range of a file, each extent into its array."""
        if self._is_direct.get(row.path, False):
            try:
                return self._read_direct(row, arrays)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct[row.path] = False  # the file system has no O_DIRECT
        return self._read_cached(row, arrays)

    def _read_cached(self, row: Range[Sink], arrays: Sequence[Bytes]) -> None:
        fd = self._open(row.path, is_direct=False)
        position = row.begin
        left = deque(self._vectors(row, arrays))
        while left:
            num_read = os.preadv(fd, list(left), position)
            if num_read == 0:
                raise self._too_short(row, position)
            position += num_read
            while left and num_read >= len(left[0]):
                num_read -= len(left.popleft())
            if num_read:
                left[0] = left[0][num_read:]

    def _vectors(self, row: Range[Sink], arrays: Sequence[Bytes]) -> Iterator[memoryview]:
        end = row.begin
        for extent, array in zip(row.extents, arrays, strict=True):
            if extent.begin > end:
                yield self._gap[: extent.begin - end].data
            yield array.data
            end = extent.end

    def _read_direct(self, row: Range[Sink], arrays: Sequence[Bytes]) -> None:
        fd = self._open(row.path, is_direct=True)
        if self._bounce is None:
            self._bounce = np.frombuffer(mmap.mmap(-1, self._bounce_bytes), np.uint8)
        bounce = self._bounce
        position = row.begin - row.begin % BLOCK_BYTES
        first = 0
        while position < row.end:
            wanted = min(self._bounce_bytes, whole_blocks(row.end - position + BLOCK_BYTES - 1))
            num_read = os.preadv(fd, [bounce[:wanted].data], position)
            end = position + num_read
            first = _scatter(row, arrays, first, bounce[:num_read], position)
            # Only the file's end may lie within a block.
            if end < row.end and (num_read == 0 or end % BLOCK_BYTES):
                raise self._too_short(row, end)
            position = end

    def _open(self, path: str, *, is_direct: bool) -> int:
        if self._opened != (path, is_direct):
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._opened = -1, None
            flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if is_direct else 0)
            self._fd = os.open(self._directory / path, flags)
            self._opened = (path, is_direct)
        return self._fd

    def _too_short(self, row: Range[Sink], end: int) -> CorruptCheckpoint:
        return CorruptCheckpoint(
            f"{self._directory / row.path} became shorter while it was read: expected bytes {row.begin} to {row.end}, "
            f"found the end at {end}. Use another checkpoint"
        )


def whole_blocks(num_bytes: int) -> int:
    """The largest multiple of a block that is no larger, or one block."""
    return max(1, num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _scatter(
    row: Range[Sink], arrays: Sequence[Bytes], first: int, source: Bytes, begin: int
) -> int:
    """Copy what a part of a file, which begins at `begin`, holds of extents from number `first` on.

    Returns:
        The number of the first extent that is not complete yet.
    """
    end = begin + len(source)
    while first < len(arrays) and row.extents[first].begin < end:
        extent = row.extents[first]
        low, high = max(begin, extent.begin), min(end, extent.end)
        arrays[first][low - extent.begin : high - extent.begin] = source[low - begin : high - begin]
        if extent.end > end:
            return first
        first += 1
    return first


def _first_fill(extent: Extent[TensorSink]) -> Bytes | None:
    return next((sink.memory for sink in extent.sinks if isinstance(sink, FillSink)), None)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
