"""What a restore will do with each stored value, gathered before anything is changed; and the places that wait for a value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from backstay.codec import Json
from backstay.load.stored import Slice, Stored


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


@dataclass(frozen=True)
class Pending:
    """Stands for a plain value that is yet to be read."""

    source: str


@dataclass(frozen=True)
class PendingTree:
    """Stands for a tree that is yet to be decoded."""

    part: str


@dataclass(frozen=True)
class PendingFrame:
    """Stands for a tensor whose class comes with its frame; the rank's part of one sharded as `parameter` is, unless None."""

    source: str
    place: Slice
    parameter: DTensor | None


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


def replaced(
    values: Mapping[str, Any],
    objects: Mapping[str, Any],
    trees: Mapping[str, Any],
    frames: Mapping[Slice, Any],
) -> dict[str, Any]:
    """Values with the stand-ins taken out."""
    result = {}
    for name, value in values.items():
        if isinstance(value, Pending):
            result[name] = objects[value.source]
        elif isinstance(value, PendingFrame):
            result[name] = frames[value.place]
        elif isinstance(value, PendingTree):
            result[name] = trees[value.part]
        else:
            result[name] = value
    return result
