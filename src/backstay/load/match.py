"""Which stored value goes to which live place, and everything that does not fit, before anything is changed.

Runs in: the training thread of each rank, for itself. Optimizer state that does not exist yet is created here from the metadata: never by a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from backstay.codec import Json, tensor_paths
from backstay.load.stored import Stored, read_objects
from backstay.state import (
    MODEL,
    OPTIMIZER_STATE,
    PARAM_GROUPS,
    Collected,
    TrainState,
    local_tensor,
)


@dataclass(frozen=True, kw_only=True)
class MatchOptions:
    """What may differ.

    Attributes:
        only: parts to load.
        strict: whether missing and unexpected values are problems.
        convert_dtype: whether another dtype is none.
    """

    only: frozenset[str]
    strict: bool = True
    convert_dtype: bool = False


@dataclass(kw_only=True)
class Match:
    """What will be done.

    Attributes:
        targets: name as stored -> the tensor that receives it.
        tensors: live key -> the same tensor, for those that are put into place afterwards.
        state: parameter -> its new optimizer state, tensors not yet filled.
        fields: (optimizer, group) -> new values of the group's fields.
        parts: name -> encoded tree.
        problems: what does not fit, one line each.
        used: names as stored that have been dealt with.
        notes: for the log.
    """

    targets: dict[str, Tensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    state: list[tuple[Optimizer, Tensor, dict[str, Any]]] = field(default_factory=list)
    fields: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    parts: dict[str, Json] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def match(state: TrainState, live: Collected, stored: Stored, options: MatchOptions) -> Match:
    """Find a place for every stored value and a value for every place."""
    found = Match()
    if "model" in options.only:
        match_model(found, live, stored, options)
    if "optimizer" in options.only:
        for optimizer in state.optimizers:
            match_optimizer(found, optimizer, live, stored, options)
    for part in ("lr_scheduler", "sampler", "extra"):
        if part in options.only:
            match_parts(found, part, live, stored, options)
    if options.strict:
        find_unexpected(found, live, stored, options)
    return found


# Model -----------------------------------------------------------------------------------------------------------------


def match_model(found: Match, live: Collected, stored: Stored, options: MatchOptions) -> None:
    """Find the stored value of each parameter and buffer, under any of its names."""
    others: dict[str, list[str]] = {}
    for name, first in live.aliases.items():
        others.setdefault(first, []).append(name)
    base = stored.place.manifest.base if stored.place.manifest is not None else None
    for key, tensor in live.tensors.items():
        if not key.startswith(MODEL):
            continue
        names = [stored.source(name) for name in [key, *others.get(key, [])]]
        there = [name for name in names if stored.tensor(name) is not None]
        found.used.update(there)
        if not there:
            if options.strict and not (base and key in live.frozen):
                found.problems.append(f"{key}: missing from the checkpoint")
            continue
        note_shared(found, key, stored, is_trained=key in live.late)
        add_target(found, key, there[0], tensor.detach(), stored, options)
    for part in live.parts:
        if part.startswith(MODEL):
            add_part(found, part, stored, options)


def note_shared(found: Match, key: str, stored: Stored, *, is_trained: bool) -> None:
    """A value that each rank had for itself, when there are other ranks now."""
    if key not in stored.own or stored.is_same_world:
        return
    if is_trained:
        found.problems.append(
            f"{key}: was trained differently on each rank, so it can only be restored on as many ranks as saved it"
        )
    else:
        found.notes.append(
            f"{key} differed between ranks; on this number of ranks all take rank 0's"
        )


def add_target(
    found: Match, key: str, source: str, tensor: Tensor, stored: Stored, options: MatchOptions
) -> None:
    """Take a stored tensor into `tensor`, if it fits."""
    entry = stored.tensor(source)
    assert entry is not None, "the caller looked"
    if tuple(entry.size) != tuple(tensor.shape):
        found.problems.append(
            f"{key}: shape {tuple(entry.size)} in the checkpoint, {tuple(tensor.shape)} here"
        )
        return
    dtype = entry.properties.dtype
    if dtype != tensor.dtype:
        if not options.convert_dtype:
            found.problems.append(
                f"{key}: {dtype} in the checkpoint, {tensor.dtype} here (convert_dtype=True converts)"
            )
            return
        found.notes.append(f"{key}: converted from {dtype} to {tensor.dtype}")
    found.targets[source] = found.tensors[key] = tensor


# Optimizer -------------------------------------------------------------------------------------------------------------


def match_optimizer(
    found: Match, optimizer: Optimizer, live: Collected, stored: Stored, options: MatchOptions
) -> None:
    """Find the state of each parameter and the fields of each group."""
    listed = stored.owners if stored.owners is not None else list_owners(stored, optimizer, live)
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
    if entry is not None:
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


@dataclass(frozen=True)
class Pending:
    """Stands for a plain value that is yet to be read."""

    source: str


@dataclass(frozen=True)
class PendingTree:
    """Stands for a tree that is yet to be decoded."""

    part: str


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


# Everything else -------------------------------------------------------------------------------------------------------


def match_parts(
    found: Match, part: str, live: Collected, stored: Stored, options: MatchOptions
) -> None:
    """Trees of plain values and tensors: schedulers, the sampler, extras."""
    for name in live.parts:
        if name == part or name.startswith(f"{part}."):
            add_part(found, name, stored, options)
            if name in found.parts:
                add_tree_tensors(found, name, live, stored, options)


def add_part(found: Match, name: str, stored: Stored, options: MatchOptions) -> None:
    """Take a stored tree, if there is one that this rank may have."""
    if name not in stored.parts:
        if options.strict:
            found.problems.append(f"{name}: missing from the checkpoint")
        return
    if name in stored.own and not stored.is_same_world:
        manifest = stored.place.manifest
        num_ranks = 0 if manifest is None else manifest.world_size
        found.problems.append(
            f"{name}: each of {num_ranks} ranks saved its own, which cannot be shared out among another number of ranks; "
            "leave the part out with only=..., or resume on as many ranks"
        )
        return
    found.parts[name] = stored.parts[name]


def add_tree_tensors(
    found: Match, part: str, live: Collected, stored: Stored, options: MatchOptions
) -> None:
    """The tensors of a tree: into the live ones where these are alike, else into new ones."""
    for path in tensor_paths(stored.parts[part]):
        source = stored.source(path)
        entry = stored.tensor(source)
        found.used.add(source)
        if entry is None:
            found.problems.append(f"{path}: missing from the checkpoint")
            continue
        current = live.tensors.get(live.aliases.get(path, path))
        is_alike = current is not None and tuple(current.shape) == tuple(entry.size)
        if current is not None and is_alike:
            add_target(found, path, source, current.detach(), stored, options)
        else:
            fresh = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
            add_target(found, path, source, fresh, stored, options)


def find_unexpected(found: Match, live: Collected, stored: Stored, options: MatchOptions) -> None:
    """Stored values of the chosen parts that have no place here."""
    for name in stored.metadata.state_dict_metadata:
        part = name.split(".", 1)[0]
        if is_numbered_group(name, stored):
            continue
        if part not in options.only or name in found.used:
            continue
        if stored.source(name) not in found.used:
            found.problems.append(f"{name}: in the checkpoint, but there is no such value here")
    for name in stored.parts:
        if (
            name.split(".", 1)[0] in options.only
            and name not in live.parts
            and name not in found.parts
        ):
            found.problems.append(f"{name}: in the checkpoint, but TrainState has no such part")


def is_numbered_group(name: str, stored: Stored) -> bool:
    """Whether a name is that of a group by number, whose values have been found by parameter."""
    number = name.removeprefix(PARAM_GROUPS).partition(".")[0]
    return name.startswith(PARAM_GROUPS) and stored.is_object(f"{PARAM_GROUPS}{number}.params")


def replaced(
    values: Mapping[str, Any], objects: Mapping[str, Any], trees: Mapping[str, Any]
) -> dict[str, Any]:
    """Values with the stand-ins taken out."""
    result = {}
    for name, value in values.items():
        if isinstance(value, Pending):
            result[name] = objects[value.source]
        elif isinstance(value, PendingTree):
            result[name] = trees[value.part]
        else:
            result[name] = value
    return result
