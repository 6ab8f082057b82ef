"""Which values the ranks share and which are a rank's own, found by comparing hashes.

Runs in: the training thread. Sharded tensors are DCP's business. Plain ones are taken for copies of one value by DCP, which keeps any one of
them: here it is made sure that they are, and those that are not are kept apart.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from backstay.coordination import Coordination
from backstay.errors import StateError
from backstay.state import PARAM_GROUPS, Collected, plain_tensors

Hashes = dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Shared:
    """How the ranks' values compare.

    Attributes:
        own: plain tensors and parts that are not the same on all ranks that have them.
        partial: names that only some ranks have.
        on_rank_0: names of the small objects that rank 0 stores.
    """

    own: frozenset[str] = frozenset()
    partial: frozenset[str] = frozenset()
    on_rank_0: frozenset[str] = frozenset()


def compare_ranks(found: Collected, ranks: Coordination) -> Shared:
    """Compare, together with all ranks, what is taken to be the same on all of them.

    Sharded tensors are DCP's business. Plain ones are taken for copies of one value by DCP, which keeps any one of them.

    Raises:
        StateError: small objects, such as the learning rate, differ.
    """
    if ranks.world_size == 1:
        return Shared()
    hashes, error = {}, None
    try:
        hashes = hash_shared(found, frozenset(found.own))
    except RuntimeError as caught:
        error = StateError(f"the state cannot be read: {caught}")
    ranks.raise_together(error)
    objects, parts = frozenset(named_objects(found)), frozenset(found.parts)
    gathered = ranks.gather(Holdings(hashes, frozenset(found.own), objects, parts))
    shared = ranks.share(None if gathered is None else _compare(gathered))
    if isinstance(shared, StateError):
        raise shared
    assert shared is not None, "rank 0 compared"
    return shared


@dataclass(frozen=True)
class Holdings:
    """What one rank has: hashes by name, names declared its own, names of small objects and of parts."""

    hashes: Hashes
    own: frozenset[str]
    objects: frozenset[str]
    parts: frozenset[str]


def _compare(gathered: list[Holdings]) -> Shared | StateError:
    first: Hashes = {}
    own: set[str] = set()
    for held in gathered:
        own |= held.own
        # Rank 0 writes the shared parts, so a part that it does not have is some other rank's own.
        own |= held.parts - gathered[0].parts
        own |= {
            name for name, value in held.hashes.items() if first.setdefault(name, value) != value
        }
    objects = frozenset().union(*(held.objects for held in gathered))
    if own & objects:
        return StateError(
            f"{sorted(own & objects)[:8]} differ between ranks; settings of optimizers have to be the same on all"
        )
    counts = Counter(name for held in gathered for name in held.hashes)
    partial = {name for name, count in counts.items() if count < len(gathered)}
    return Shared(own=frozenset(own), partial=frozenset(partial), on_rank_0=gathered[0].objects)


def hash_shared(found: Collected, own: frozenset[str]) -> Hashes:
    """Hash of each plain tensor and part that is taken to be the same on all ranks."""
    hashes = {
        key: hash_tensor(tensor)
        for key, tensor in found.tensors.items()
        if key not in own and not isinstance(tensor, DTensor)
    }
    trees = [*found.parts.items(), *named_objects(found).items()]
    return hashes | {name: _hash(repr(tree).encode()) for name, tree in trees if name not in own}


def hash_steady(found: Collected, apart: frozenset[str]) -> int:
    """One number for all that has to be the same on all ranks and is cheap to compare: not what only an optimizer changes.

    61 bits, so that it fits the agreement.

    Args:
        apart: names to be passed over.
    """
    hasher = xxhash.xxh3_64()
    for key, tensor in found.tensors.items():
        if key in found.late or key in found.frozen or key in apart or isinstance(tensor, DTensor):
            continue
        hasher.update(hash_tensor(tensor).to_bytes(8, "little"))
    for name, tree in [*found.parts.items(), *found.objects.items()]:
        if name not in apart and not is_member_list(name):
            hasher.update(repr(tree).encode())
    return hasher.intdigest() >> 3


def hash_tensor(tensor: Tensor) -> int:
    """Hash of a tensor's dtype, shape and bytes."""
    hasher = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    for part in plain_tensors(tensor):
        hasher.update(bytes_view(part))
    return hasher.intdigest()


def bytes_view(tensor: Tensor) -> memoryview:
    """The bytes of a plain tensor, row by row; copied only if they are elsewhere or in another order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _hash(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def named_objects(found: Collected) -> dict[str, Any]:
    """Small objects by the first key that names each, but for what says who belongs to a group: that may differ between ranks."""
    keys = object_keys(found)
    return {
        keys[slot][0]: value for slot, value in found.objects.items() if not is_member_list(slot)
    }


def is_member_list(name: str) -> bool:
    """Whether an object lists the parameters of a group."""
    return name.startswith(PARAM_GROUPS) and name.endswith(".params")


def partial_slots(found: Collected, shared: Shared) -> frozenset[str]:
    """Slots of small objects that only some ranks have."""
    keys = object_keys(found)
    return frozenset(slot for slot in found.objects if keys[slot][0] in shared.partial)


def object_keys(found: Collected) -> dict[str, list[str]]:
    """Slot of each small object -> all keys that name it."""
    shared = {
        f"{group.slot}.{name}": [f"{PARAM_GROUPS}{owner}.{name}" for owner in group.owners]
        for group in found.groups
        for name in group.fields
    }
    return {slot: shared.get(slot, [slot]) for slot in found.objects}
