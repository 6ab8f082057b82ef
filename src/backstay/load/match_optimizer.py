"""Where stored optimizer state goes: created from the metadata where it does not exist yet, never by a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from backstay.codec import tensor_paths
from backstay.load.match import (
    Match,
    MatchOptions,
    Pending,
    PendingFrame,
    PendingTree,
    add_part,
    add_target,
    note_shared,
)
from backstay.load.stored import Stored, read_objects
from backstay.state import OPTIMIZER_STATE, PARAM_GROUPS, Collected, local_tensor


def match_optimizer(
    found: Match, optimizer: Optimizer, live: Collected, stored: Stored, options: MatchOptions
) -> None:
    """Find the state of each parameter and the fields of each group."""
    # Ours are listed by rank 0; what only other ranks have is found by name, as in a stock checkpoint.
    listed = list_owners(stored, optimizer, live) | (stored.owners or {})
    for group in optimizer.param_groups:
        owners = [live.owner_of[id(parameter)] for parameter in group["params"]]
        for owner, parameter in zip(owners, group["params"], strict=True):
            state: dict[str, Any] = {}
            for name in listed.get(owner, []):
                place = StatePlace(optimizer, group, parameter, owner, name)
                match_state_value(found, state, place, live, stored, options)
            found.state.append((optimizer, parameter, state))
        match_fields(found, group, owners, stored, options)


def list_owners(stored: Stored, optimizer: Optimizer, live: Collected) -> dict[str, list[str]]:
    """Names of state values per parameter, for a checkpoint that does not list them.

    A parameter with any state is taken to need what others with as many dimensions have: some of it missing is then noticed.
    """
    listed: dict[str, list[str]] = {}
    for full in stored.names(OPTIMIZER_STATE):
        owner, _, name = full.removeprefix(OPTIMIZER_STATE).rpartition(".")
        listed.setdefault(owner, []).append(name)
    usual: dict[int, dict[str, None]] = {}
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter in parameters:
        names = listed.get(live.owner_of[id(parameter)], [])
        usual.setdefault(parameter.ndim, {}).update(dict.fromkeys(names))
    complete = {}
    for parameter in parameters:
        owner = live.owner_of[id(parameter)]
        if owner in listed:
            complete[owner] = list(usual[parameter.ndim])
    return complete


@dataclass(frozen=True)
class StatePlace:
    """One value of one parameter's optimizer state."""

    optimizer: Optimizer
    group: dict[str, Any]
    parameter: Tensor
    owner: str
    name: str

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return f"{OPTIMIZER_STATE}{self.owner}.{self.name}"


def match_state_value(
    found: Match,
    state: dict[str, Any],
    place: StatePlace,
    live: Collected,
    stored: Stored,
    options: MatchOptions,
) -> None:
    """One value of a parameter's state: a tensor, a plain value, or a tree of both."""
    key, source = place.key, stored.source(place.key)
    note_shared(found, key, stored, is_trained=True)
    entry = stored.tensor(source)
    if source in stored.opaque:
        found.used.add(source)
        state[place.name] = match_frame(found, place, stored, source)
    elif entry is not None:
        target = make_state_tensor(place, entry.size, entry.properties.dtype, stored)
        state[place.name] = target
        found.used.add(source)
        add_target(found, key, source, target, stored, options)
    elif stored.is_object(source):
        found.used.add(source)
        state[place.name] = Pending(source)
    elif key in stored.parts:
        add_part(found, key, stored, options)
        for path in tensor_paths(stored.parts[key]):
            inner = stored.tensor(stored.source(path))
            if inner is None:
                found.problems.append(f"{path}: missing from the checkpoint")
                continue
            target = make_state_tensor(place, inner.size, inner.properties.dtype, stored, key=path)
            add_target(found, path, stored.source(path), target, stored, options)
            found.used.add(stored.source(path))
        state[place.name] = PendingTree(key)
    else:
        found.problems.append(
            f"{key}: missing from the checkpoint, though other state of that parameter is there"
        )


def match_frame(
    found: Match, place: StatePlace, stored: Stored, source: str
) -> PendingFrame | None:
    """The frame with exactly this rank's part: such tensors can neither be cut nor joined."""
    entry = stored.tensor(source)
    assert entry is not None, "what is listed as a tensor is one"
    shape, offsets, parameter = tuple(entry.size), (0,) * len(entry.size), None
    if isinstance(place.parameter, DTensor) and shape == tuple(place.parameter.shape):
        parameter = place.parameter
        local_shape, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        shape = tuple(local_shape)
    for index, info in stored.metadata.storage_data.items():
        is_here = index.fqn == source and tuple(index.offset or ()) == tuple(offsets)
        sizes = {tuple(chunk.sizes) for chunk in entry.chunks if chunk.offsets == index.offset}
        if is_here and shape in sizes:
            where = (info.relative_path, info.offset, info.length)
            return PendingFrame(source, where, parameter)
    found.problems.append(
        f"{place.key}: a tensor of a special class, stored in other parts than are needed here; "
        "it can only be restored on as many ranks, sharded in the same way"
    )
    return None


def make_state_tensor(
    place: StatePlace,
    size: Sequence[int],
    dtype: torch.dtype,
    stored: Stored,
    key: str | None = None,
) -> Tensor:
    """An empty tensor for a value of optimizer state: the live one if it fits, else one placed as the parameter is."""
    parameter, shape = place.parameter, tuple(size)
    placements = find_placements(parameter, shape, stored.placements.get(key or place.key))
    current = place.optimizer.state.get(parameter, {}).get(place.name)
    if isinstance(current, Tensor) and fits(current, shape, dtype, placements):
        return current.detach()
    device = local_tensor(parameter).device
    if place.name == "step" and not (place.group.get("capturable") or place.group.get("fused")):
        device = torch.device("cpu")  # as torch keeps the counter of its own optimizers
    if placements is None or not isinstance(parameter, DTensor):
        return torch.empty(shape, dtype=dtype, device=device)
    return empty_dtensor(parameter, shape, dtype, placements)


def fits(
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    placements: Sequence[Placement] | None,
) -> bool:
    """Whether a live tensor can take a stored value as it is."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        return False
    if isinstance(tensor, DTensor):
        return placements is not None and tuple(tensor.placements) == tuple(placements)
    return placements is None


def find_placements(
    parameter: Tensor, shape: tuple[int, ...], recorded: list[list[Any]] | None
) -> tuple[Placement, ...] | None:
    """How a value of a parameter's state is sharded; None: not at all."""
    if not isinstance(parameter, DTensor):
        return None
    if recorded is None:
        return tuple(parameter.placements) if shape == tuple(parameter.shape) else None
    parsed: list[Placement] = [
        Shard(int(each[1])) if each[0] == "shard" else Replicate() for each in recorded
    ]
    num_dims = parameter.device_mesh.ndim
    if len(parsed) == num_dims:
        return tuple(parsed)
    # Saved on a mesh with other dimensions: the last one is the one that shards.
    shard = next((each for each in parsed if each.is_shard()), Replicate())
    return (*[Replicate()] * (num_dims - 1), shard)


def empty_dtensor(
    parameter: DTensor, shape: tuple[int, ...], dtype: torch.dtype, placements: Sequence[Placement]
) -> DTensor:
    """An uninitialised sharded tensor on the parameter's mesh."""
    mesh = parameter.device_mesh
    local_shape, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    device = parameter._local_tensor.device
    local = torch.empty(tuple(local_shape), dtype=dtype, device=device)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def match_fields(
    found: Match,
    group: dict[str, Any],
    owners: Sequence[str],
    stored: Stored,
    options: MatchOptions,
) -> None:
    """The fields of a parameter group, which all its parameters must agree on."""
    values: dict[str, Any] = {}
    for owner in owners:
        for name, source in stored.fields(owner).items():
            here = field_value(found, source, group.get(name), stored, options)
            found.used.add(source)
            if name in values and not is_same_field(values[name], here, stored):
                found.problems.append(
                    f"{PARAM_GROUPS}{owner}.{name}: differs between the parameters of one group here; "
                    "the groups were cut otherwise when saving"
                )
            values.setdefault(name, here)
    if not owners:
        return
    if not values and options.strict:
        found.problems.append(
            f"{PARAM_GROUPS}{owners[0]}: missing from the checkpoint (was it in another optimizer, or not in any?)"
        )
    found.fields.append((group, values))


def field_value(
    found: Match, source: str, current: Any, stored: Stored, options: MatchOptions
) -> Any:
    """A field of a group: a tensor to be filled, or a plain value to be read."""
    entry = stored.tensor(source)
    if entry is None:
        return Pending(source)
    if source in found.used:
        return found.targets.get(source)
    target = (
        current.detach()
        if isinstance(current, Tensor)
        else torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
    )
    add_target(found, source, source, target, stored, options)
    return target


def is_same_field(first: Any, second: Any, stored: Stored) -> bool:
    """Whether two parameters of a group have the same value for a field."""
    if not (isinstance(first, Pending) and isinstance(second, Pending)):
        return type(first) is type(second)
    if stored.slices[first.source] == stored.slices[second.source]:
        return True
    values = read_objects(stored, [first.source, second.source])
    return bool(values[first.source] == values[second.source])
