"""A frame: what `torch.save` writes for one tensor or object, the unit of a DCP data file.

A tensor's frame is an uncompressed zip: a head, the raw bytes, a tail. Head and tail depend on dtype
and shape alone once checksums are off (`torch.load` does not look at them), so they can be made
before there is any value, and the value copied in between later.

Source of the format: `torch.serialization` and its zip writer, as of torch 2.13.
"""

import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import IO, cast

import torch

# Local file header of a zip record: signature, ..., length of the name, length of the extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DATA_NAME = b"archive/data/0"


@dataclass(frozen=True)
class TensorFrame:
    """The fixed parts of a contiguous tensor's frame.

    Attributes:
        head: what stands before the raw bytes.
        tail: what stands after them.
        data_bytes: how many raw bytes there are.
    """

    head: bytes
    tail: bytes
    data_bytes: int

    @property
    def data_offset(self) -> int:
        """Where the raw bytes begin, from the start of the frame; a multiple of 64."""
        return len(self.head)

    @property
    def num_bytes(self) -> int:
        """Size of the whole frame."""
        return len(self.head) + self.data_bytes + len(self.tail)


@lru_cache(maxsize=65536)
def tensor_frame(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorFrame:
    """The frame of a contiguous CPU tensor, without its values.

    Costs no memory traffic: the tensor that is saved is never touched, and the sink drops its bytes.
    """
    tensor = torch.empty(shape, dtype=dtype)
    sink = _Sink(tensor.nbytes)
    with _without_checksums():
        torch.save(tensor, cast(IO[bytes], sink))
    return TensorFrame(bytes(sink.head), bytes(sink.tail), tensor.nbytes)


def object_frame(value: object) -> bytes:
    """The frame of a plain Python object or a tensor subclass, values included."""
    buffer = io.BytesIO()
    with _without_checksums():
        torch.save(value, buffer)
    return buffer.getvalue()


class _Sink:
    """Keeps what is written before and after the data record and drops what is in it."""

    def __init__(self, data_bytes: int) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self._left = data_bytes
        self._in_head = True

    def write(self, piece: bytes | memoryview) -> int:
        view = memoryview(piece).cast("B")
        if self._in_head:
            self.head += view
            self._in_head = not _is_complete(self.head)
            return len(view)
        num_dropped = min(self._left, len(view))
        self._left -= num_dropped
        self.tail += view[num_dropped:]
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""


def _is_complete(head: bytearray) -> bool:
    """Whether `head` ends where the data record's content begins."""
    name_at = head.rfind(_DATA_NAME)
    if name_at < _LOCAL_HEADER.size:
        return False
    header_at = name_at - _LOCAL_HEADER.size
    signature, num_name, num_extra = _LOCAL_HEADER.unpack_from(head, header_at)
    if signature != b"PK\x03\x04" or num_name != len(_DATA_NAME):
        return False
    end: int = name_at + num_name + num_extra
    assert len(head) <= end, "torch.save wrote the data record's header and content in one piece"
    return len(head) == end


@contextmanager
def _without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
