"""Merging adapters into a copy of their base: the model that was trained is only read, so that nothing wears down and nothing is added twice.

Runs in: all ranks together, layer after layer in the order of the model.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from backstay.errors import ModelError
from backstay.naming import named_parameters
from backstay.state import local_tensor
from backstay.training.lora import ADAPTER, base_name


@torch.no_grad()
def merge_into(plain: nn.Module, trained: nn.Module) -> None:
    """Give a model without adapters the weights W + scale B A of one with them; computed in float32, rounded once to the dtype of W.

    Args:
        plain: the same architecture, spread over ranks like `trained`, with arbitrary values.

    Raises:
        ModelError: `plain` has no place for a weight.
    """
    for module in trained.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass the root's weights are whole
    targets = named_parameters(plain)
    deltas = adapted_layers(trained)
    for name, weight in named_parameters(trained).items():
        if ".lora_" in name:
            continue
        target = targets.get(base_name(name))
        if target is None:
            raise ModelError(f"{base_name(name)}: expected in the merged model, which lacks it")
        layer = deltas.get(id(weight))
        local_tensor(target).copy_(
            local_tensor(weight) if layer is None else merged_rows(weight, layer)
        )
    copy_buffers(plain, trained)


def adapted_layers(model: nn.Module) -> dict[int, Any]:
    """Id of each weight beside which there is an adapter -> peft's layer."""
    return {
        id(module.base_layer.weight): module  # type: ignore[union-attr]
        for module in model.modules()
        if hasattr(module, "base_layer") and hasattr(module, "lora_A")
    }


def merged_rows(weight: Tensor, layer: Any) -> Tensor:
    """This rank's rows of a merged weight, in float32; the factors are gathered, which are small."""
    first, second = (whole(each[ADAPTER].weight) for each in (layer.lora_A, layer.lora_B))
    rows = rows_of(weight)
    delta = layer.scaling[ADAPTER] * (second[rows].float() @ first.float())
    merged: Tensor = local_tensor(weight).float() + delta
    if ADAPTER in getattr(layer, "lora_magnitude_vector", {}):  # DoRA: its length is learnt apart
        magnitude = whole(layer.lora_magnitude_vector[ADAPTER].weight)[rows].float()
        merged = merged * (magnitude / merged.norm(dim=1))[:, None]
    return merged


def rows_of(weight: Tensor) -> slice:
    """Which rows of a weight this rank has.

    Raises:
        ModelError: it is not spread by rows.
    """
    if not isinstance(weight, DTensor):
        return slice(0, weight.shape[0])
    spread = [each for each in weight.placements if not each.is_replicate()]
    if not all(each.is_shard(0) for each in spread) or len(spread) > 1:
        raise ModelError(f"expected a weight spread by rows, found {weight.placements}")
    shape, offset = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return slice(offset[0], offset[0] + shape[0])


def copy_buffers(plain: nn.Module, trained: nn.Module) -> None:
    """Buffers have the same values, too."""
    values = {base_name(name): buffer for name, buffer in trained.named_buffers()}
    for name, buffer in plain.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
