"""Plan which bytes to read: from windows of stored tensors to extents of files. Pure.

A chunk is a tensor as stored, in a frame of its own; a window is the part of it that is wanted.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from backstay.frame_head import FrameHead, parse_head
from backstay.frames import tensor_frame
from backstay.load.coalesce import MAX_GAP_BYTES, Extent

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class TensorRead:
    """A window of a stored chunk, and the memory that it goes to.

    Attributes:
        key: the tensor's name, for messages.
        path: the data file, relative to the checkpoint's directory.
        offset: of the frame in the file.
        length: of the frame's slice; zeros may follow the frame in it.
        dtype: of the stored chunk, as the metadata says.
        chunk_shape: of the stored chunk.
        starts: where the window begins in the chunk, per dimension.
        lengths: the window's shape.
        target: of that shape; of any strides, device and dtype (values are converted), or a subclass.
    """

    key: str
    path: str
    offset: int
    length: int
    dtype: torch.dtype
    chunk_shape: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class Window:
    """Where a part of a chunk lies in the chunk, per dimension."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored tensor: what its reads have in common."""

    path: str
    offset: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HeadSink:
    """Bytes that must be the head of a chunk's frame as predicted."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class FillSink:
    """Bytes that are a part of a target as they are."""

    memory: Bytes


@dataclass(frozen=True, slots=True)
class WindowSink:
    """Bytes that enclose a window, to be copied to the target element by element."""

    dtype: torch.dtype
    stride: tuple[int, ...]
    target: torch.Tensor


TensorSink: TypeAlias = HeadSink | FillSink | WindowSink


def group(reads: Sequence[TensorRead]) -> dict[Chunk, list[TensorRead]]:
    """Put the reads of each chunk together."""
    chunks: dict[Chunk, list[TensorRead]] = {}
    for read in reads:
        assert tuple(read.target.shape) == read.lengths, f"{read.key}: the window has another shape"
        chunk = Chunk(read.path, read.offset, read.length, read.dtype, tuple(read.chunk_shape))
        chunks.setdefault(chunk, []).append(read)
    return chunks


def predict(chunk: Chunk) -> FrameHead | None:
    """Where a contiguous tensor of that kind lies in a frame as this torch writes it."""
    if math.prod(chunk.shape) * chunk.dtype.itemsize > chunk.length:
        return None
    return _predicted(chunk.dtype, chunk.shape)


@lru_cache(maxsize=65536)
def _predicted(dtype: torch.dtype, shape: tuple[int, ...]) -> FrameHead | None:
    try:
        return parse_head(tensor_frame(dtype, shape).head)
    except (KeyError, RuntimeError):  # torch.save does not know the dtype
        return None


def window_extents(
    head: FrameHead, read: TensorRead, max_bytes: int
) -> Iterator[Extent[TensorSink]]:
    """What to read of a chunk's frame for a window, in parts of `max_bytes` at most."""
    window = Window(read.starts, read.lengths)
    target = read.target.detach()
    if _is_image(head, window, target):
        yield from _fills(head, window, read.offset, target, max_bytes)
        return
    # A tensor subclass may not know how to be cut.
    for part in split_window(head, window, max_bytes) if _is_plain(target) else [window]:
        inside = [start - origin for start, origin in zip(part.starts, read.starts, strict=True)]
        cut = target if part == window else target[index(inside, part.lengths)]
        if _is_image(head, part, cut):
            yield from _fills(head, part, read.offset, cut, max_bytes)
        else:
            begin, end = byte_window(head, part)
            sink = WindowSink(head.dtype, head.stride, cut)
            yield Extent(read.offset + begin, read.offset + end, (sink,))


def _fills(
    head: FrameHead, window: Window, offset: int, target: torch.Tensor, max_bytes: int
) -> Iterator[Extent[TensorSink]]:
    begin, end = byte_window(head, window)
    memory: Bytes = target.reshape(-1).view(torch.uint8).numpy()
    for at in range(0, end - begin, max_bytes):
        piece = memory[at : at + max_bytes]
        first = offset + begin + at
        yield Extent(first, first + len(piece), (FillSink(piece),))


def _is_plain(target: torch.Tensor) -> bool:
    return type(target) in (torch.Tensor, torch.nn.Parameter)


def _is_image(head: FrameHead, window: Window, target: torch.Tensor) -> bool:
    """Whether a target's memory is, byte for byte, what a file holds of the window."""
    return (
        _is_plain(target)
        and target.dtype == head.dtype
        and target.device.type == "cpu"
        and target.layout == torch.strided
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
        and is_dense(window, head.stride)
    )


def index(starts: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """What a window is in brackets."""
    return tuple(
        slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
    )


def byte_window(head: FrameHead, window: Window) -> tuple[int, int]:
    """The enclosing run of a window's bytes, from the start of the frame: begin and end."""
    size = head.dtype.itemsize
    first = head.storage_offset + _dot(window.starts, head.stride)
    if 0 in window.lengths:
        return head.data_offset + first * size, head.data_offset + first * size
    last = first + _dot(window.lengths, head.stride) - sum(head.stride)
    return head.data_offset + first * size, head.data_offset + (last + 1) * size


def _dot(counts: Iterable[int], strides: Iterable[int]) -> int:
    return sum(map(mul, counts, strides))


def is_dense(window: Window, stride: tuple[int, ...]) -> bool:
    """Whether a window's elements follow one another in the file in row-major order."""
    expected = 1
    for length, step in zip(reversed(window.lengths), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


def split_window(
    head: FrameHead, window: Window, max_bytes: int, max_gap: int = MAX_GAP_BYTES
) -> Iterator[Window]:
    """Cut a window into parts whose enclosing runs have `max_bytes` at most, or one element.

    Where more than `max_gap` bytes that are not wanted come between two rows, each row is a part.
    """
    begin, end = byte_window(head, window)
    if math.prod(window.lengths) <= 1:
        yield window
        return
    # The dimension of the largest step: parts along any other would overlap in the file.
    dim = max(
        (dim for dim, length in enumerate(window.lengths) if length > 1),
        key=lambda dim: head.stride[dim],
    )
    is_sparse = _gap(head, window, dim) > max_gap
    if end - begin <= max_bytes and not is_sparse:
        yield window
        return
    step = 1 if is_sparse else max(1, min(_rows(head, dim, max_bytes), window.lengths[dim] - 1))
    for start in range(0, window.lengths[dim], step):
        part = _narrow(window, dim, start, min(step, window.lengths[dim] - start))
        yield from split_window(head, part, max_bytes, max_gap)


def _gap(head: FrameHead, window: Window, dim: int) -> int:
    """Bytes between two rows, which are what has one index of `dim`."""
    begin, end = byte_window(head, _narrow(window, dim, 0, 1))
    return head.stride[dim] * head.dtype.itemsize - (end - begin)


def _rows(head: FrameHead, dim: int, max_bytes: int) -> int:
    """How many indices of `dim` fit, in whole steps."""
    return max_bytes // max(1, head.stride[dim] * head.dtype.itemsize)


def _narrow(window: Window, dim: int, start: int, length: int) -> Window:
    starts, lengths = list(window.starts), list(window.lengths)
    starts[dim] += start
    lengths[dim] = length
    return Window(tuple(starts), tuple(lengths))
