"""Layout: the write items of one rank -> where each frame lies in its two data files (pure).

`__K_0.distcp` holds what is trained, buffers and small objects; `__K_1.distcp` holds parameters that nothing trains.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import WriteItem

from backstay.frames import TensorFrame, tensor_frame

# torch puts the bytes of a tensor at a multiple of this from the start of its frame; we keep it from the start of the file.
ALIGNMENT = 64
PAGE_BYTES = 4096
TRAINED, FROZEN = 0, 1
NUM_FILES = 2
# Room for an object's frame to grow before a new plan is needed. Zeros may follow a frame inside its slice: torch looks for
# the end of a zip archive in the last 64 KiB.
OBJECT_SLACK_BYTES = 512


@dataclass(frozen=True, slots=True)
class Piece:
    """One frame of a file.

    Attributes:
        name: key under which it is stored.
        file: `TRAINED` or `FROZEN`.
        offset, num_bytes: its slice of the file.
        dtype, shape: of a plain tensor; None for an object or a tensor subclass, whose whole frame comes with its value.
    """

    name: str
    file: int
    offset: int
    num_bytes: int
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()

    @property
    def frame(self) -> TensorFrame:
        """The fixed parts of a plain tensor's frame."""
        assert self.dtype is not None, f"the whole frame of {self.name} comes with its value"
        return tensor_frame(self.dtype, self.shape)

    @property
    def data_offset(self) -> int:
        """Where in the file the raw bytes of a plain tensor begin."""
        return self.offset + self.frame.data_offset


@dataclass(frozen=True)
class Layout:
    """All frames of one rank, in the order of its write items.

    Attributes:
        file_bytes: exact size of each file; 0 means that there is none.
    """

    pieces: tuple[Piece, ...]
    file_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(self.file_bytes)


def make_layout(
    items: Iterable[WriteItem], *, frozen: frozenset[str], slots: Mapping[str, int]
) -> Layout:
    """Lay out write items.

    Args:
        frozen: names that go to the second file.
        slots: name -> bytes to reserve, for objects and tensor subclasses.
    """
    ends = [0] * NUM_FILES
    pieces = []
    for item in items:
        name = item.index.fqn
        file = FROZEN if name in frozen else TRAINED
        offset = round_up(ends[file], ALIGNMENT)
        if name in slots:
            piece = Piece(name, file, offset, slots[name])
        else:
            dtype, shape = stored_form(item)
            piece = Piece(name, file, offset, tensor_frame(dtype, shape).num_bytes, dtype, shape)
        pieces.append(piece)
        ends[file] = offset + piece.num_bytes
    return Layout(tuple(pieces), tuple(ends))


def stored_form(item: WriteItem) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of what a write item stores."""
    assert item.tensor_data is not None, f"{item.index.fqn} is an object and needs a slot"
    return item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)


def slot_bytes(frame_bytes: int) -> int:
    """What to reserve for a frame that may grow a little."""
    return round_up(frame_bytes + OBJECT_SLACK_BYTES, ALIGNMENT)


def round_up(value: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-value // unit) * unit


def file_name(rank: int, file: int) -> str:
    """Name of a data file in the weights directory, as DCP would give it."""
    return f"__{rank}_{file}.distcp"
