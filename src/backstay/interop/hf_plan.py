"""Plan of an export: which tensor goes to which bytes of which file. Pure.

Source of the format: the safetensors README ("Format").
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from backstay.errors import StateError
from backstay.interop.hf_options import ExportOptions

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
METADATA = {"format": "pt"}
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Bytes of the number that a file begins with: the length of the header.
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Spec:
    """What is known of a tensor without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Tensors of the model that are converted together.

    Attributes:
        sources: their names in the model.
        outputs: name and spec of each tensor that comes out, before the dtype is changed.
        is_converted: whether values are rearranged; else there is one source and one output, perhaps of another name.
    """

    sources: tuple[str, ...]
    outputs: tuple[tuple[str, Spec], ...]
    is_converted: bool = False


@dataclass(frozen=True)
class Slot:
    """The place of one tensor.

    Attributes:
        file: name of the file.
        offset: of the values, from the start of the file.
    """

    name: str
    spec: Spec
    file: str
    offset: int


@dataclass(frozen=True)
class FilePlan:
    """One file: what it begins with, and what follows without a gap."""

    name: str
    header: bytes
    slots: tuple[Slot, ...]

    @property
    def num_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(slot.spec.num_bytes for slot in self.slots)


@dataclass(frozen=True)
class ExportPlan:
    """All files of an export, and what goes into them."""

    groups: tuple[Group, ...]
    files: tuple[FilePlan, ...]

    @property
    def slots(self) -> dict[str, Slot]:
        """Name -> place."""
        return {slot.name: slot for file in self.files for slot in file.slots}

    @property
    def index(self) -> bytes | None:
        """Content of the index file; None if there is one file only."""
        if len(self.files) == 1:
            return None
        total = sum(slot.spec.num_bytes for file in self.files for slot in file.slots)
        places = {slot.name: file.name for file in self.files for slot in file.slots}
        document = {"metadata": {"total_size": total}, "weight_map": places}
        return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def make_plan(groups: Sequence[Group], options: ExportOptions) -> ExportPlan:
    """Plan the files of an export.

    Raises:
        StateError: two tensors have one name, or safetensors does not know a dtype.
    """
    specs: dict[str, Spec] = {}
    for group in groups:
        for name, spec in group.outputs:
            if name in specs:
                raise StateError(f"two tensors would be exported as {name}")
            dtype = options.dtype_of(spec.dtype, (*group.sources, name))
            if dtype not in DTYPE_NAMES:
                raise StateError(f"{name}: safetensors has no dtype for {dtype}")
            specs[name] = Spec(dtype, spec.shape)
    shards = split(specs.items(), options.max_shard_bytes)
    count = len(shards)
    names = [SINGLE_NAME]
    if count > 1:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    files = [plan_file(name, shard) for name, shard in zip(names, shards, strict=True)]
    return ExportPlan(tuple(groups), tuple(files))


def split(tensors: Iterable[tuple[str, Spec]], max_bytes: int) -> list[list[tuple[str, Spec]]]:
    """Fill one shard after the other; a tensor that is larger than a shard gets one of its own. At least one shard comes out."""
    shards: list[list[tuple[str, Spec]]] = []
    current: list[tuple[str, Spec]] = []
    filled = 0
    for name, spec in tensors:
        if spec.num_bytes > max_bytes:
            shards.append([(name, spec)])
            continue
        if current and filled + spec.num_bytes > max_bytes:
            shards.append(current)
            current, filled = [], 0
        current.append((name, spec))
        filled += spec.num_bytes
    if current or not shards:
        shards.append(current)
    return shards


def plan_file(file: str, tensors: Sequence[tuple[str, Spec]]) -> FilePlan:
    """Lay out one file: wide dtypes first, so that every value is aligned as readers need it."""
    ordered = sorted(tensors, key=lambda each: -each[1].dtype.itemsize)
    fields: dict[str, object] = {"__metadata__": METADATA}
    ends = [0]
    for name, spec in ordered:
        begin, end = ends[-1], ends[-1] + spec.num_bytes
        fields[name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        ends.append(end)
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    slots = [
        Slot(name, spec, file, len(header) + begin)
        for (name, spec), begin in zip(ordered, ends, strict=False)
    ]
    return FilePlan(file, header, tuple(slots))
