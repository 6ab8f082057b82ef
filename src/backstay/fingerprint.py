"""Fingerprint of frozen parameters, the same however they are sharded: what a `trainable_only` checkpoint is bound to.

The sum over all elements of a mix of value and global position, modulo 2**64: linear, so that each rank adds up its own shard.
"""

from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from backstay.coordination import Coordination
from backstay.state import Collected, local_tensor

CHUNK_ELEMENTS = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers with well spread bits (of SplitMix64), as signed 64-bit values.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


def fingerprint_frozen(found: Collected, ranks: Coordination) -> str:
    """Fingerprint of all frozen parameters, computed together with all ranks; "" if there are none."""
    total = 0
    for key in found.frozen:
        tensor = found.tensors[key]
        if is_counted(tensor, ranks.rank):
            name = xxhash.xxh3_64_intdigest(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
            total += (name | 1) * (sum_tensor(tensor) + is_first(tensor))
    total %= 2**64
    signed = total - 2**64 if total >= 2**63 else total
    (has_any,) = ranks.agree([int(bool(found.frozen))])
    return f"{ranks.add(signed) % 2**64:016x}" if has_any.high else ""


def is_counted(tensor: Tensor, rank: int) -> bool:
    """Whether this rank's part counts: of several copies only one does."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    replicated = [i for i, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return all(coordinate[dim] == 0 for dim in replicated)


def is_first(tensor: Tensor) -> bool:
    """Whether this rank is the one that counts the tensor itself, once however many shards it has."""
    if not isinstance(tensor, DTensor):
        return True
    return not any(tensor.device_mesh.get_coordinate() or ())


@torch.no_grad()
def sum_tensor(tensor: Tensor) -> int:
    """The sum for this rank's part of a tensor."""
    local = local_tensor(tensor).detach()
    offsets = (0,) * local.ndim
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
    total = 0
    for bits, position in _chunks(local, tuple(offsets), tuple(tensor.shape)):
        mixed = bits + position * _STEP
        mixed = (mixed ^ (mixed >> 30)) * _MIX
        mixed = (mixed ^ (mixed >> 27)) * _STEP
        total += int((mixed ^ (mixed >> 31)).sum().item())
    return total % 2**64


def _chunks(
    local: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Bits of the elements as integers, and their global positions, a bounded number at a time."""
    words = max(1, local.element_size() // 8)
    integer = _INTEGERS[min(local.element_size(), 8)]
    flat = local.contiguous().reshape(-1)
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        part = flat[start : start + CHUNK_ELEMENTS]
        bits = part.view(torch.uint8).view(integer).to(torch.int64)
        inside = torch.arange(start, start + part.numel(), device=local.device)
        position = _global_position(inside, tuple(local.shape), offsets, shape)
        if words > 1:
            word = torch.arange(words, device=local.device)
            position = (position[:, None] * words + word).reshape(-1)
        yield bits, position


def _global_position(
    inside: Tensor, local: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Tensor:
    """Row-major positions in a shard -> row-major positions in the whole tensor."""
    position = torch.zeros_like(inside)
    stride = 1
    for size, offset, whole in zip(
        reversed(local), reversed(offsets), reversed(shape), strict=True
    ):
        position += (inside % size + offset) * stride
        inside = inside // size
        stride *= whole
    return position
