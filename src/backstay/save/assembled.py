"""Assembled: a folder of each checkpoint that other programs read, made of tensors that the checkpoint holds anyway.

Runs in: the training thread, when a plan is made, on rank 0. The bytes are copied by rank 0's writer, from file to file (`assemble.py`).
"""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import PurePosixPath

import torch

from backstay.errors import InvalidArgument, StateError
from backstay.save.assemble import Recipe

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
RESERVED = ("weights", "state", "rng", "state.json", "manifest.json")


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A folder with a safetensors file and small files of fixed content.

    Attributes:
        folder: one name, in the checkpoint's directory.
        weights: name of the safetensors file.
        tensors: name in that file -> name as stored, e.g. "model.head.weight".
        files: name -> content of the other files.
    """

    folder: str
    weights: str
    tensors: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [self.folder, self.weights, *self.files]
        bad = [n for n in names if len(PurePosixPath(n).parts) != 1 or n in (".", "..", "/")]
        if bad or self.folder in RESERVED or self.weights in self.files:
            raise InvalidArgument(
                f"Assembled(folder={self.folder!r}, weights={self.weights!r}, files={sorted(self.files)}): expected plain, different names, and a "
                f"folder that is none of {', '.join(RESERVED)}"
            )


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and where its raw bytes lie."""

    path: str
    offset: int
    dtype: torch.dtype | None
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def make_recipes(
    assembled: Assembled,
    chunks: Mapping[str, Sequence[Chunk]],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[Recipe]:
    """How its files are put together.

    Args:
        chunks: of each tensor by its stored name.
        shapes: of whole tensors by stored name.

    Raises:
        StateError: a tensor is not stored, or not in a form that safetensors has.
    """
    missing = sorted(name for name in assembled.tensors.values() if not chunks.get(name))
    if missing:
        raise StateError(
            f"{assembled.folder}/{assembled.weights} is to hold {', '.join(missing[:5])} ({len(missing)} in all), which checkpoints of this state do "
            "not hold as tensors; name stored tensors, as in 'model.<parameter>'"
        )
    dtypes = {name: dtype_of(stored, chunks[stored]) for name, stored in assembled.tensors.items()}
    # The largest items first keep all of them aligned, as the format's own writer does.
    order = sorted(dtypes, key=lambda name: (-dtypes[name].itemsize, name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ranges: list[tuple[str, int, int]] = []
    at = 0
    for name in order:
        stored, dtype = assembled.tensors[name], dtypes[name]
        end = at + math.prod(shapes[stored]) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": shapes[stored], "data_offsets": [at, end]}
        ranges += find_ranges(stored, shapes[stored], dtype.itemsize, chunks[stored])
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return [
        Recipe(
            path=f"{assembled.folder}/{assembled.weights}", head=b64(head), ranges=tuple(ranges)
        ),
        *(Recipe(path=f"{assembled.folder}/{n}", head=b64(d)) for n, d in assembled.files.items()),
    ]


def b64(data: bytes) -> str:
    """Bytes as JSON can hold them."""
    return base64.b64encode(data).decode()


def dtype_of(name: str, chunks: Sequence[Chunk]) -> torch.dtype:
    """The dtype of a stored tensor, if safetensors has it."""
    (found,) = {chunk.dtype for chunk in chunks}
    if found is None or found not in DTYPES:
        raise StateError(
            f"{name} is stored as {found or 'a tensor subclass'}, which safetensors files cannot hold"
        )
    return found


def find_ranges(
    name: str, shape: tuple[int, ...], itemsize: int, chunks: Sequence[Chunk]
) -> list[tuple[str, int, int]]:
    """The ranges that make up the whole tensor, in order."""
    runs = sorted(run for chunk in chunks for run in find_runs(chunk, shape, itemsize))
    end = 0
    for start, _, _, size in runs:
        if start != end:
            raise StateError(
                f"the shards of {name} {shape} leave a gap or overlap at byte {end} of it"
            )
        end += size
    if end != math.prod(shape) * itemsize:
        raise StateError(f"the shards of {name} {shape} end at byte {end} of it")
    return [(path, offset, size) for _, path, offset, size in runs]


def find_runs(
    chunk: Chunk, shape: tuple[int, ...], itemsize: int
) -> Iterator[tuple[int, str, int, int]]:
    """The pieces of a chunk that are contiguous in the whole: one, if it holds whole rows. Start in the whole, path, offset, bytes."""
    if 0 in chunk.sizes:
        return
    last = len(shape)
    while last and chunk.sizes[last - 1] == shape[last - 1]:
        last -= 1
    outer = max(last - 1, 0)  # one run per index in the dimensions before this
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    size = math.prod(chunk.sizes[outer:]) * itemsize
    inner = sum(s * t for s, t in zip(chunk.starts[outer:], strides[outer:], strict=True))
    for number, index in enumerate(product(*map(range, chunk.sizes[:outer]))):
        start = inner + sum(
            (a + i) * t
            for a, i, t in zip(chunk.starts[:outer], index, strides[:outer], strict=True)
        )
        yield start * itemsize, chunk.path, chunk.offset + number * size, size
