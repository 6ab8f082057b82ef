"""Trees of plain Python values <-> JSON, exactly: what goes to `state.json` instead of a pickle.

Floats survive to the last bit (JSON numbers are written with `repr`), tuples stay tuples, integer keys stay integers.
Tensors do not go into JSON: they are handed to the caller under their path and only referred to by it.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping

import numpy as np
import torch

from backstay.errors import CorruptCheckpoint, StateError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
_MAX_DEPTH = 64


def encode(value: object, path: str, tensors: dict[str, torch.Tensor]) -> Json:
    """Turn a tree into JSON.

    Args:
        value: dicts, lists, tuples, sets, numbers, strings, bytes, None, numpy arrays, dtypes, devices, tensors.
        path: where the tree stands, for messages and as prefix of tensor keys.
        tensors: receives `{path of the tensor: tensor}`.

    Raises:
        StateError: a value of another type, named by its path.
    """
    if path.count(".") > _MAX_DEPTH + 64:
        raise StateError(f"{path[:200]}...: nested too deep, or the tree contains itself")
    if value is None or type(value) in (bool, int, str):
        return value  # type: ignore[return-value]
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        if tensors.setdefault(path, value) is not value:
            raise StateError(f"two values are called {path!r}")
        return {"$tensor": path}
    if type(value) in (list, tuple, set, frozenset):
        return _encode_sequence(value, path, tensors)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors)
    return _encode_leaf(value, path)


def _encode_sequence(
    value: list[object] | tuple[object, ...] | set[object],
    path: str,
    tensors: dict[str, torch.Tensor],
) -> Json:
    is_set = isinstance(value, (set, frozenset))
    ordered = sorted(value, key=repr) if is_set else value
    items = [encode(item, f"{path}.{index}", tensors) for index, item in enumerate(ordered)]
    return items if type(value) is list else {f"${type(value).__name__}": items}


def _encode_dict(value: dict[object, object], path: str, tensors: dict[str, torch.Tensor]) -> Json:
    is_plain = type(value) is dict and all(
        type(key) is str and not key.startswith("$") for key in value
    )
    if is_plain:
        return {str(key): encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    kinds: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
    if type(value) not in kinds:
        raise StateError(f"{path}: a {type(value).__name__} cannot be stored; make it a plain dict")
    pairs: list[Json] = []
    for key, item in value.items():
        pairs.append(
            [encode(key, f"{path}.<key>", tensors), encode(item, f"{path}.{key}", tensors)]
        )
    return {kinds[type(value)]: pairs}


def _encode_leaf(value: object, path: str) -> Json:
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        text = base64.b64encode(array.tobytes()).decode()
        kind = "$array" if isinstance(value, np.ndarray) else "$scalar"
        return {kind: [array.dtype.str, list(array.shape), text]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.Size):
        return {"$tuple": list(value)}
    raise StateError(
        f"{path}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be stored; "
        "expected numbers, strings, bytes, tensors, numpy arrays and containers of them. "
        "Return such values from state_dict(), and rebuild the object in load_state_dict()"
    )


def decode(value: object, tensors: Mapping[str, torch.Tensor]) -> object:
    """The inverse of `encode`.

    Args:
        tensors: those that `encode` handed out, by path.

    Raises:
        CorruptCheckpoint: not something that `encode` writes.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        if kind.startswith("$"):
            return _decode_tagged(kind, content, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def tensor_paths(value: object) -> list[str]:
    """The paths of all tensors that an encoded tree refers to."""
    if isinstance(value, list):
        return [path for item in value for path in tensor_paths(item)]
    if isinstance(value, dict):
        if set(value) == {"$tensor"}:
            return [str(value["$tensor"])]
        return [path for item in value.values() for path in tensor_paths(item)]
    return []


def _decode_tagged(kind: str, content: object, tensors: Mapping[str, torch.Tensor]) -> object:
    decoders: dict[str, Callable[[], object]] = {
        "$float": lambda: float(str(content)),
        "$tensor": lambda: tensors[str(content)],
        "$tuple": lambda: tuple(decode(item, tensors) for item in _as_list(content)),
        "$set": lambda: {decode(item, tensors) for item in _as_list(content)},
        "$frozenset": lambda: frozenset(decode(item, tensors) for item in _as_list(content)),
        "$dict": lambda: dict(_pairs(content, tensors)),
        "$ordered": lambda: OrderedDict(_pairs(content, tensors)),
        "$counter": lambda: Counter(dict(_pairs(content, tensors))),
        "$bytes": lambda: base64.b64decode(str(content), validate=True),
        "$array": lambda: _array(content),
        "$scalar": lambda: _array(content)[()],
        "$dtype": lambda: _dtype(str(content)),
        "$device": lambda: torch.device(str(content)),
    }
    if kind not in decoders:
        raise CorruptCheckpoint(f"state.json: unknown kind of value {kind!r}")
    try:
        return decoders[kind]()
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CorruptCheckpoint(f"state.json: a {kind} value cannot be read: {error}") from error


def _as_list(content: object) -> list[object]:
    if not isinstance(content, list):
        raise TypeError(f"expected a list, found {type(content).__name__}")
    return content


def _pairs(content: object, tensors: Mapping[str, torch.Tensor]) -> list[tuple[object, object]]:
    return [
        (decode(key, tensors), decode(item, tensors))
        for key, item in map(_as_list, _as_list(content))
    ]


def _array(content: object) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    dtype, shape, text = _as_list(content)
    kind = np.dtype(str(dtype))
    if kind.kind not in "biufc":
        raise ValueError(f"numpy dtype {kind} is not a number")
    sizes = tuple(int(str(size)) for size in _as_list(shape))
    flat = np.frombuffer(base64.b64decode(str(text), validate=True), dtype=kind)
    return flat.reshape(sizes).copy()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no torch dtype {name!r}")  # noqa: TRY004
    return dtype
