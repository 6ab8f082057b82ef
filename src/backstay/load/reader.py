"""Read stored tensors into memory that is there already, with few large reads and without unpickling.

Runs in: the caller's thread and, until the call returns, threads of its own. Guarantees: the first exception stops
all threads and is raised; a frame's head is compared with what its place was predicted from, and where they
differ the head decides. Assumes: nobody else writes to the targets, and the files do not change.
"""

import io
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from backstay import points
from backstay.errors import CorruptCheckpoint
from backstay.frame_head import FrameHead, parse_head
from backstay.frames import tensor_frame
from backstay.load.coalesce import Extent, Range, coalesce
from backstay.load.file_ranges import Workspace, whole_blocks
from backstay.load.page_cache import is_cold
from backstay.load.plan import (
    Bytes,
    Chunk,
    FillSink,
    HeadSink,
    TensorRead,
    TensorSink,
    WindowSink,
    group,
    index,
    predict,
    window_extents,
)

__all__ = ["ReadStats", "TensorRead", "read_slices", "read_tensors"]

MAX_RANGE_BYTES = 64 << 20
MIN_RANGE_BYTES = 1 << 20
BOUNCE_BYTES = 8 << 20
# Heads of plain tensors have some 700 bytes; a larger storage alignment makes them longer.
HEAD_SIZES = (4 << 10, 64 << 10)
_END_OF_ZIP = b"PK\x05\x06"
_END_OF_ZIP_BYTES = 22

Job = TypeVar("Job")
_parse_exact_head = lru_cache(maxsize=8192)(parse_head)


@dataclass(frozen=True, kw_only=True)
class ReadStats:
    """What a call read.

    Attributes:
        num_bytes: from files, heads of frames included.
        seconds: the whole call.
        direct: whether any file was read past the page cache.
    """

    num_bytes: int
    seconds: float
    direct: bool


def read_tensors(
    directory: Path,
    reads: Sequence[TensorRead],
    *,
    num_threads: int = 4,
    budget_bytes: int = 1 << 30,
    direct: bool | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ReadStats:
    """Fill the targets of all reads.

    Args:
        directory: holds the data files.
        reads: in any order; several may be of the same bytes.
        num_threads: that read at the same time.
        budget_bytes: of memory beside the targets. Only a chunk that is no plain tensor, or the window
            of a target that is a tensor subclass, takes what it needs.
        direct: read past the page cache. None: those files that are not in it.
        on_progress: is told the number of bytes after each read, in the thread that read.

    Raises:
        CorruptCheckpoint: a file is missing or too short, or a frame is not what the metadata says.
        OSError: reading failed.
    """
    begin = time.perf_counter()
    points.reach("load.read")
    chunks = group(reads)
    _check_files(
        directory,
        [(each[0].key, chunk.path, chunk.offset, chunk.length) for chunk, each in chunks.items()],
    )
    reading = _Reading(directory, chunks, num_threads, budget_bytes, direct, on_progress)
    try:
        reading.run()
    finally:
        # Filling memory goes unnoticed by torch, unlike `copy_`.
        torch.autograd.graph.increment_version([read.target for read in reads])
    return ReadStats(
        num_bytes=sum(reading.num_bytes),
        seconds=time.perf_counter() - begin,
        direct=any(reading.is_direct.values()),
    )


def read_slices(directory: Path, slices: Sequence[tuple[str, int, int]]) -> list[bytes]:
    """The bytes of small slices (file, offset, length), in the order asked for.

    Raises:
        CorruptCheckpoint: a file is missing or too short.
        OSError: reading failed.
    """
    _check_files(directory, [("a slice", *each) for each in slices])
    extents: dict[str, list[Extent[int]]] = {}
    for number, (path, offset, length) in enumerate(slices):
        extents.setdefault(path, []).append(Extent(offset, offset + length, (number,)))
    found = [b""] * len(slices)
    with closing(Workspace(directory, {})) as space:
        for path, wanted in extents.items():
            for row in coalesce(path, wanted, max_bytes=MAX_RANGE_BYTES):
                arrays = [np.empty(extent.num_bytes, np.uint8) for extent in row.extents]
                space.read(row, arrays)
                for extent, array in zip(row.extents, arrays, strict=True):
                    content = array.tobytes()
                    for number in extent.sinks:
                        found[number] = content
    return found


def _check_files(directory: Path, slices: Iterable[tuple[str, str, int, int]]) -> None:
    """Hold what is to be read against the sizes of the files."""
    sizes: dict[str, int] = {}
    for key, path, offset, length in slices:
        if path not in sizes:
            sizes[path] = _file_size(directory / path, key)
        if offset + length > sizes[path]:
            raise CorruptCheckpoint(
                f"{directory / path} is too short: {key} is stored from byte {offset} to {offset + length}, "
                f"and the file has {sizes[path]}. Use another checkpoint"
            )


def _file_size(path: Path, key: str) -> int:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise CorruptCheckpoint(
            f"{path} is missing: expected a data file with {key} in it. Use another checkpoint"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise CorruptCheckpoint(f"{path}: expected a data file with {key}, found something else")
    return found.st_size


class _Reading:
    """The state that the threads of one call share; they only append to it, or set items."""

    def __init__(
        self,
        directory: Path,
        chunks: dict[Chunk, list[TensorRead]],
        num_threads: int,
        budget_bytes: int,
        direct: bool | None,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.directory = directory
        self.chunks = chunks
        self.num_threads = num_threads
        self.on_progress = on_progress
        self.bounce_bytes = whole_blocks(min(BOUNCE_BYTES, budget_bytes // (4 * num_threads)))
        self.range_bytes = self._choose_range_bytes(budget_bytes)
        self.is_direct = self._choose_direct(direct)
        self.num_bytes: list[int] = []
        self.known: dict[Chunk, FrameHead | None] = {}
        self.suspects: list[Chunk] = []

    def _choose_range_bytes(self, budget_bytes: int) -> int:
        """Small enough for the budget and for all threads to have work, large enough to be fast."""
        wanted = sum(
            read.target.numel() * read.dtype.itemsize
            for each in self.chunks.values()
            for read in each
        )
        share = max(MIN_RANGE_BYTES, wanted // (4 * self.num_threads))
        return whole_blocks(min(MAX_RANGE_BYTES, share, budget_bytes // (2 * self.num_threads)))

    def _choose_direct(self, direct: bool | None) -> dict[str, bool]:
        slices: dict[str, list[tuple[int, int]]] = {}
        for chunk in self.chunks:
            slices.setdefault(chunk.path, []).append((chunk.offset, chunk.length))
        if direct is not None:
            return dict.fromkeys(slices, direct)
        return {path: is_cold(self.directory / path, each) for path, each in slices.items()}

    def run(self) -> None:
        """Read where prediction says, then what was predicted wrongly, then what is no plain tensor."""
        self._learn(self._samples())
        odd = {chunk.path for chunk, head in self.known.items() if head != predict(chunk)}
        self._learn(
            chunk
            for chunk in self.chunks
            if chunk not in self.known and (chunk.path in odd or predict(chunk) is None)
        )
        self._read(self.chunks)
        self._learn(self.suspects)
        self._read(self.suspects)
        for chunk, head in self.known.items():
            if head is None:
                self._load_whole(chunk)

    def _samples(self) -> Iterable[Chunk]:
        """One chunk of each file: if its frame is as predicted, most likely the others are."""
        return {chunk.path: chunk for chunk in reversed(self.chunks)}.values()

    def _learn(self, chunks: Iterable[Chunk]) -> None:
        """Find out from their frames where the values of chunks are."""
        self._share(list(chunks), self._learn_one)

    def _learn_one(self, chunk: Chunk, space: Workspace) -> None:
        head = None
        for size in HEAD_SIZES:
            extent: Extent[int] = Extent(chunk.offset, chunk.offset + min(size, chunk.length), ())
            if head is None and extent.num_bytes:
                array = np.empty(extent.num_bytes, np.uint8)
                space.read(Range(chunk.path, (extent,)), [array])
                head = parse_head(array.tobytes())
        if head is not None:
            self._check_head(chunk, head)
        self.known[chunk] = head

    def _check_head(self, chunk: Chunk, head: FrameHead) -> None:
        self._check_kind(chunk, head.dtype, head.shape)
        if head.data_offset + head.data_bytes > chunk.length:
            raise CorruptCheckpoint(
                f"{self._name(chunk)}: the frame's values end {head.data_offset + head.data_bytes} bytes after it begins, "
                f"but the metadata gives it {chunk.length}. Use another checkpoint"
            )

    def _check_kind(self, chunk: Chunk, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if (dtype, shape) != (chunk.dtype, chunk.shape):
            raise CorruptCheckpoint(
                f"{self._name(chunk)}: expected {chunk.dtype} of shape {chunk.shape} as in the metadata, "
                f"found {dtype} of shape {shape}. Use another checkpoint"
            )

    def _name(self, chunk: Chunk) -> str:
        key = self.chunks[chunk][0].key
        return f"{self.directory / chunk.path}: {key} in the frame at byte {chunk.offset}"

    def _read(self, chunks: Iterable[Chunk]) -> None:
        """Read all chunks whose place is known or predicted."""
        extents: dict[str, list[Extent[TensorSink]]] = {}
        for chunk in chunks:
            extents.setdefault(chunk.path, []).extend(self._extents(chunk))
        ranges = [
            row
            for path, wanted in extents.items()
            for row in coalesce(path, wanted, max_bytes=self.range_bytes)
        ]
        self._share(ranges, self._read_range)

    def _extents(self, chunk: Chunk) -> Iterator[Extent[TensorSink]]:
        head = self.known.get(chunk)
        if chunk not in self.known:
            head = predict(chunk)
            assert head is not None, "chunks that cannot be predicted were learned"
            yield Extent(chunk.offset, chunk.offset + head.data_offset, (HeadSink(chunk),))
        if head is not None:
            for read in self.chunks[chunk]:
                yield from window_extents(head, read, self.range_bytes // 2)

    def _read_range(self, row: Range[TensorSink], space: Workspace) -> None:
        arrays = space.places_for(row)
        space.read(row, arrays)
        for extent, array in zip(row.extents, arrays, strict=True):
            for sink in extent.sinks:
                self._deliver(array, sink)
        self._count(sum(extent.num_bytes for extent in row.extents))

    def _deliver(self, array: Bytes, sink: TensorSink) -> None:
        if isinstance(sink, FillSink):
            if sink.memory is not array:
                sink.memory[:] = array
        elif isinstance(sink, WindowSink):
            values = torch.from_numpy(array).view(sink.dtype)
            sink.target.copy_(values.as_strided(sink.target.shape, sink.stride))
        elif not _is_as_predicted(sink.chunk, array.tobytes()):
            self.suspects.append(sink.chunk)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes.append(num_bytes)
        if self.on_progress is not None:
            self.on_progress(num_bytes)

    def _load_whole(self, chunk: Chunk) -> None:
        """Let torch's restricted unpickler make a tensor that is not stored as a plain one."""
        (frame,) = read_slices(self.directory, [(chunk.path, chunk.offset, chunk.length)])
        found = _unpickle(frame, self._name(chunk))
        if not isinstance(found, torch.Tensor):
            raise CorruptCheckpoint(
                f"{self._name(chunk)}: expected a tensor, found {type(found).__name__}"
            )
        self._check_kind(chunk, found.dtype, tuple(found.shape))
        with torch.no_grad():
            for read in self.chunks[chunk]:
                is_whole = read.lengths == chunk.shape
                part = found if is_whole else found[index(read.starts, read.lengths)]
                read.target.detach().copy_(part)
        self._count(chunk.length)

    def _share(self, jobs: Sequence[Job], do: Callable[[Job, Workspace], None]) -> None:
        """Do all jobs on threads; the first exception ends them all."""
        waiting = iter(jobs)
        stop = threading.Event()

        def work() -> None:
            space = Workspace(self.directory, self.is_direct, self.bounce_bytes)
            try:
                with closing(space), torch.no_grad():
                    for job in waiting:
                        if stop.is_set():
                            return
                        do(job, space)
            finally:
                stop.set()

        num_threads = min(self.num_threads, len(jobs))
        if num_threads <= 1:
            return work()
        with ThreadPoolExecutor(num_threads, thread_name_prefix="backstay-read") as pool:
            try:
                for future in [pool.submit(work) for _ in range(num_threads)]:
                    future.result()
            finally:
                stop.set()


def _is_as_predicted(chunk: Chunk, head: bytes) -> bool:
    expected = tensor_frame(chunk.dtype, chunk.shape).head
    return head == expected or _parse_exact_head(head) == predict(chunk)


def _unpickle(frame: bytes, source: str) -> object:
    # Enough zeros behind the end hide it from torch.
    end = frame.rfind(_END_OF_ZIP) + _END_OF_ZIP_BYTES
    try:
        return torch.load(io.BytesIO(frame[:end]), weights_only=True, map_location="cpu")
    except Exception as error:  # hostile bytes may raise anything; none of it is ours to tell apart
        raise CorruptCheckpoint(
            f"{source}: expected a tensor, found what torch.load(weights_only=True) refuses: {error}. If you trust the "
            "checkpoint and it holds tensors of a class of yours, admit that by torch.serialization.add_safe_globals"
        ) from error
