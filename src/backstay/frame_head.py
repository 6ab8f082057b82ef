"""The head of a frame that was read back: where the raw bytes are and what they mean. Its pickle is looked at, never run.

Source of the format: `torch.serialization` and its zip writer, as of torch 2.13.
"""

import io
import pickletools
import struct
import sys
from dataclasses import dataclass
from typing import cast

import torch

# Local file header of a zip record: signature, flags, compression, size of the content, lengths of name and extra field.
_RECORD_HEADER = struct.Struct("<4s2xHH8xI4xHH")
_RECORD_SIGNATURE = b"PK\x03\x04"
# What follows the content of a record whose header could not know its size: signature, CRC, sizes.
_DESCRIPTOR = struct.Struct("<4s4xII")
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_SIZE_FOLLOWS = 0x0008
# Records that torch writes between the pickle and the raw bytes hold a word or a number.
_MAX_SMALL_RECORD = 64
_STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
    "torch ComplexFloatStorage": torch.complex64,
    "torch ComplexDoubleStorage": torch.complex128,
}
# Everything that hostile bytes make `pickletools` and `struct` raise.
_PARSE_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    struct.error,
)


@dataclass(frozen=True)
class FrameHead:
    """What a frame's head says about the tensor behind it.

    Attributes:
        data_offset: where the raw bytes of the storage begin, from the start of the frame.
        data_bytes: how many there are.
        dtype, shape, stride, storage_offset: the tensor as a view of its storage, in elements.
    """

    data_offset: int
    data_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


def parse_head(data: bytes) -> FrameHead | None:
    """Find a plain CPU tensor's place and layout in its frame, without running anything.

    Args:
        data: a frame, or as much of its beginning as reaches to the raw bytes.

    Returns:
        None for whatever is not exactly what `torch.save` writes for one plain tensor or parameter: another
        object, a subclass, a compressed zip, big-endian bytes, a cut head, or no frame at all.
    """
    try:
        return _parse_records(data)
    except _PARSE_ERRORS:
        return None


@dataclass(frozen=True)
class _Record:
    """A zip record's local header; `num_bytes` is None if only a descriptor behind it tells."""

    name: str
    begin: int
    num_bytes: int | None


@dataclass(frozen=True)
class _View:
    """A tensor as the pickle describes it; `key` names the record of its storage."""

    key: str
    dtype: torch.dtype
    data_bytes: int
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _parse_records(data: bytes) -> FrameHead | None:
    record = _read_record(data, 0)
    root, _, name = record.name.rpartition("/")
    pickled, end = _read_pickle(data, record.begin)
    view = _as_view(pickled)
    if name != "data.pkl" or view is None or not _lies_in_storage(view):
        return None
    record = _read_record(data, _skip_descriptor(data, record, end))
    while record.name != f"{root}/data/{view.key}":
        end = _read_small_record(data, record, root)
        record = _read_record(data, _skip_descriptor(data, record, end))
    if record.begin > len(data) or record.num_bytes not in (None, view.data_bytes):
        return None
    return FrameHead(
        record.begin, view.data_bytes, view.dtype, view.shape, view.stride, view.storage_offset
    )


def _read_record(data: bytes, at: int) -> _Record:
    signature, flags, compression, num_bytes, num_name, num_extra = _RECORD_HEADER.unpack_from(
        data, at
    )
    if signature != _RECORD_SIGNATURE or compression != 0:
        raise ValueError("no uncompressed record")
    name_at = at + _RECORD_HEADER.size
    begin = name_at + num_name + num_extra
    is_known = not flags & _SIZE_FOLLOWS and num_bytes != 0xFFFFFFFF
    name = data[name_at : name_at + num_name].decode()
    return _Record(name, begin, num_bytes if is_known else None)


def _skip_descriptor(data: bytes, record: _Record, end: int) -> int:
    """Where the next record begins, after one whose content ends at `end`."""
    if record.num_bytes is not None:
        if record.begin + record.num_bytes != end:
            raise ValueError("the content has another size than its header says")
        return end
    signature, *sizes = _DESCRIPTOR.unpack_from(data, end)
    if signature != _DESCRIPTOR_SIGNATURE or sizes != [end - record.begin] * 2:
        raise ValueError("the content has another size than its descriptor says")
    return end + _DESCRIPTOR.size


def _read_small_record(data: bytes, record: _Record, root: str) -> int:
    """The end of a record that does not matter, once it is known that it does not."""
    if record.num_bytes is not None:
        end = record.begin + record.num_bytes
    else:
        end = data.index(_DESCRIPTOR_SIGNATURE, record.begin, record.begin + _MAX_SMALL_RECORD + 4)
    content = data[record.begin : end]
    name = record.name.removeprefix(f"{root}/")
    if name == "byteorder":
        is_harmless = content == b"little" == sys.byteorder.encode()
    else:
        is_harmless = name in (".format_version", ".storage_alignment") and content.isdigit()
    if not is_harmless:
        raise ValueError(f"unexpected record {name}")
    return end


# Values of a pickle that is looked at: classes of our own, so that no pickled value passes for one.


@dataclass(frozen=True)
class _Global:
    name: str


@dataclass(frozen=True)
class _Call:
    function: object
    arguments: object


@dataclass(frozen=True)
class _Persistent:
    key: object


_NO_HOOKS = _Call(_Global("collections OrderedDict"), ())
_MARK = object()
_CONSTANTS: dict[str, object] = {
    "EMPTY_TUPLE": (),
    "NEWFALSE": False,
    "NEWTRUE": True,
    "MARK": _MARK,
}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _read_pickle(data: bytes, begin: int) -> tuple[object, int]:
    """What a pickle would build, as inert values, and where it ends."""
    stack: list[object] = []
    memo: dict[int, object] = {}
    stream = io.BytesIO(data)
    stream.seek(begin)
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name == "STOP":
            (value,) = stack
            return value, stream.tell()
        _look_at(opcode.name, argument, stack, memo)
    raise ValueError("the pickle does not end")


def _look_at(name: str, argument: object, stack: list[object], memo: dict[int, object]) -> None:
    """Apply one opcode of those that a tensor needs."""
    if name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _LITERALS:
        stack.append(argument)
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[cast(int, argument)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[cast(int, argument)])
    elif name == "GLOBAL":
        stack.append(_Global(cast(str, argument)))
    elif name == "BINPERSID":
        stack.append(_Persistent(stack.pop()))
    elif name == "REDUCE":
        arguments = stack.pop()
        stack.append(_Call(stack.pop(), arguments))
    elif name in _TUPLES or name == "TUPLE":
        _pack(stack, _TUPLES.get(name))
    elif name != "PROTO":
        raise ValueError(f"no tensor needs {name}")


def _pack(stack: list[object], num_items: int | None) -> None:
    """Replace the last items, or those from the last mark on, by a tuple of them."""
    if num_items is None:
        begin = max(at for at, value in enumerate(stack) if value is _MARK)
        items = tuple(stack[begin + 1 :])
    else:
        begin = len(stack) - num_items
        items = tuple(stack[begin:])
    if begin < 0:
        raise IndexError("the stack is too short")
    stack[begin:] = [items]


def _as_view(value: object) -> _View | None:
    """The view that `torch._utils._rebuild_tensor_v2` or `_v3` would make, None if it is anything else."""
    match value:
        case _Call(_Global("torch._utils _rebuild_parameter"), (inner, bool(), hooks)):
            return _as_view(inner) if hooks == _NO_HOOKS else None
        case _Call(
            _Global("torch._utils _rebuild_tensor_v2"),
            (_Persistent(storage), int(offset), tuple(shape), tuple(stride), bool(), hooks),
        ):
            dtype = None
        case _Call(
            _Global("torch._utils _rebuild_tensor_v3"),
            (
                _Persistent(storage),
                int(offset),
                tuple(shape),
                tuple(stride),
                bool(),
                hooks,
                _Global(dtype),
            ),
        ):
            pass
        case _:
            return None
    return _on_storage(storage, dtype, (offset, shape, stride)) if hooks == _NO_HOOKS else None


def _on_storage(
    storage: object, dtype: str | None, place: tuple[int, tuple[object, ...], tuple[object, ...]]
) -> _View | None:
    """A view of a storage in host memory; `dtype` is None where the storage tells."""
    offset, shape, stride = place
    match storage:
        case ("storage", _Global(kind), str(key), "cpu", int(size)):
            found = _STORAGES.get(kind) if dtype is None else _dtype(kind, dtype)
        case _:
            return None
    if found is None or not all(type(number) is int for number in (offset, size, *shape, *stride)):
        return None
    num_bytes = size * found.itemsize if dtype is None else size
    return _View(
        key,
        found,
        num_bytes,
        offset,
        cast(tuple[int, ...], shape),
        cast(tuple[int, ...], stride),
    )


def _dtype(storage: str, name: str) -> torch.dtype | None:
    """A dtype by its global name; not by `getattr`, which would let torch import modules."""
    module, _, attribute = name.partition(" ")
    found = vars(torch).get(attribute)
    is_known = storage == "torch.storage UntypedStorage" and module == "torch"
    return found if is_known and isinstance(found, torch.dtype) else None


def _lies_in_storage(view: _View) -> bool:
    numbers = (view.storage_offset, view.data_bytes, *view.shape, *view.stride)
    if min(numbers) < 0 or len(view.shape) != len(view.stride):
        return False
    if 0 in view.shape:
        return True
    last = sum((length - 1) * step for length, step in zip(view.shape, view.stride, strict=True))
    return (view.storage_offset + last + 1) * view.dtype.itemsize <= view.data_bytes
