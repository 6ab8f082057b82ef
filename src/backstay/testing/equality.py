"""Bit-equality of train states: what every round trip and every resume has to show."""

from collections.abc import Iterable, Iterator, Mapping

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from backstay.naming import canonical_names

MAX_SHOWN = 10


def state_bytes(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] = ()
) -> dict[str, str]:
    """Name -> dtype, shape and hash of the bytes of every full tensor; other values by their `repr`.

    Sharded tensors are gathered, so all ranks must call; the result does not depend on how they were sharded. Optimizer state
    goes by `state.<parameter>.<key>` and `param_groups.<parameter>.<key>`, several optimizers' together.
    """
    raw = model.state_dict(keep_vars=True)
    canonical = canonical_names(model, list(raw))
    found = {canonical[name]: value for name, value in raw.items()}
    names = {id(value): name for name, value in reversed(found.items())}
    for each in [optimizer] if isinstance(optimizer, Optimizer) else optimizer:
        found |= _optimizer_values(each, names)
    return {name: _describe(found[name]) for name in sorted(found)}


def assert_bit_equal(left: Mapping[str, str], right: Mapping[str, str]) -> None:
    """Compare two results of `state_bytes`.

    Raises:
        AssertionError: they differ; the message names the first differences.
    """
    differences = list(_differences(left, right))
    if differences:
        head = f"{len(differences)} of {len({*left, *right})} values differ"
        more = ["..."] if len(differences) > MAX_SHOWN else []
        raise AssertionError("\n".join([head, *differences[:MAX_SHOWN], *more]))


def _optimizer_values(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                values[f"state.{name}.{key}"] = value
            for key, value in group.items():
                if key != "params":
                    values[f"param_groups.{name}.{key}"] = value
    return values


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    tensor = value.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    flat = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    digest = xxhash.xxh3_64_hexdigest(flat.numpy().tobytes())
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {digest}"


def _differences(left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*left, *right}):
        if name not in left:
            yield f"{name}: only on the right"
        elif name not in right:
            yield f"{name}: only on the left"
        elif left[name] != right[name]:
            yield f"{name}: {left[name]} != {right[name]}"
