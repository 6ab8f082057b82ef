"""TrainState: the live parts of a training, and how their values are collected for a save.

Collecting has no side effect on what is trained: no dummy optimizer step, no collective, and references are never kept from one save
to the next, because modules and optimizers may rebind what they hold.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from backstay import codec
from backstay.codec import Json
from backstay.errors import InvalidArgument, StateError
from backstay.naming import canonical_names, named_parameters

MODEL = "model."
OPTIMIZER_STATE = "optimizer.state."
PARAM_GROUPS = "optimizer.param_groups."
# Written by torch beside the fields of a group, for its own loading; names follow from the keys here.
NOT_A_FIELD = frozenset({"params", "param_names"})
PARTS = ("model", "optimizer", "lr_scheduler", "sampler", "extra", "rng")


@runtime_checkable
class Stateful(Protocol):
    """Anything with a state dict: schedulers, samplers, modules, the user's own classes."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass
class PerRank:
    """Marks a value in `extra` that is a rank's own, such as a replay buffer: each rank gets back what it saved.

    On another number of ranks it cannot be given back, and `restore` says so. Values that differ between ranks are found
    and kept apart without this mark as well; the mark saves the search and states the intent.
    """

    value: Any


@dataclass(kw_only=True)
class TrainState:
    """The live objects of a training, by their role.

    Attributes:
        model: as the loop calls it, wrapped or not; its parameters may be sharded in any way that DTensor can.
        optimizer: one, or several that own different parameters.
        lr_scheduler: one, or several.
        sampler: the data position: anything with `state_dict` and `load_state_dict`.
        extra: by name: objects with a state dict (an EMA copy), tensors, plain values, any of them in `PerRank`. `restore` changes
            objects and tensors in place and replaces plain values in this dict.
    """

    model: nn.Module
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    lr_scheduler: Any = None
    sampler: Stateful | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InvalidArgument(
                f"TrainState(model=...): expected a torch.nn.Module, got a {type(self.model).__name__}"
            )
        for optimizer in self.optimizers:
            if not isinstance(optimizer, Optimizer):
                raise InvalidArgument(
                    "TrainState(optimizer=...): expected a torch.optim.Optimizer or a sequence of them, "
                    f"got a {type(optimizer).__name__}"
                )
        for part, value in [("sampler", self.sampler), *_numbered("lr_scheduler", self.schedulers)]:
            if value is not None and not isinstance(value, Stateful):
                raise InvalidArgument(
                    f"TrainState({part}=...): a {type(value).__name__} has no state_dict and load_state_dict"
                )
        for name in self.extra:
            if not isinstance(name, str) or not name or "." in name:
                raise InvalidArgument(f"TrainState(extra=...): {name!r} is not a name without dots")

    @property
    def optimizers(self) -> list[Optimizer]:
        """All optimizers."""
        return as_list(self.optimizer)

    @property
    def schedulers(self) -> list[Any]:
        """All schedulers."""
        return as_list(self.lr_scheduler)


def as_list(value: Any) -> list[Any]:
    """None, one, or several as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _numbered(part: str, values: Sequence[Any]) -> list[tuple[str, Any]]:
    return (
        [(part, values[0])]
        if len(values) == 1
        else [(f"{part}.{i}", v) for i, v in enumerate(values)]
    )


@dataclass(frozen=True, kw_only=True)
class Group:
    """A parameter group as it is stored: each field once, under the names of all its parameters.

    Attributes:
        slot: stands for the group in the names of shared values.
        owners: what its values are stored under: the canonical names of its parameters and, where that is not ambiguous, the
            number of the group, as stock DCP has it.
        fields: names of the fields that are no tensors.
    """

    slot: str
    owners: tuple[str, ...]
    fields: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The values of a train state at one moment; tensors are live, not copied.

    Attributes:
        tensors: key -> tensor; a tensor with several names stands under its first.
        aliases: further name -> first name.
        late: keys that change in `optimizer.step()` only; all others may change in forward and backward.
        frozen: keys of parameters that nothing trains.
        objects: slot -> small plain value that is stored as a frame.
        groups: who shares those slots that belong to parameter groups; any other slot is a key itself.
        parts: name of a part -> what goes to `state.json`.
        own: keys and names of parts that were declared `PerRank`.
        owners: canonical name -> names of its optimizer's state values.
        owner_of: id of a parameter that an optimizer holds -> canonical name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    frozen: set[str] = field(default_factory=set)
    objects: dict[str, Any] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    parts: dict[str, Json] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    owners: dict[str, list[str]] = field(default_factory=dict)
    owner_of: dict[int, str] = field(default_factory=dict)


class Collector:
    """Collects a train state again and again; keeps nothing but names between two times."""

    def __init__(self, state: TrainState) -> None:
        self.state = state
        self._raw_names: list[str] = []
        self._canonical: dict[str, str] = {}

    def collect(self) -> Collected:
        """The values as they are now.

        Raises:
            StateError: the state cannot be stored; the message names the place.
        """
        found = Collected()
        seen: dict[int, str] = {}
        names = self._collect_model(found, seen)
        trained: set[int] = set()
        optimizers = self.state.optimizers
        for number, optimizer in enumerate(optimizers):
            source = OptimizerSource(number, optimizer, names, trained, len(optimizers) == 1)
            _collect_optimizer(found, seen, source)
        _sort_parameters(found, trained)
        for part, scheduler in _numbered("lr_scheduler", self.state.schedulers):
            _collect_tree(found, seen, part, scheduler.state_dict())
        if self.state.sampler is not None:
            _collect_tree(found, seen, "sampler", self.state.sampler.state_dict())
        for name, value in self.state.extra.items():
            _collect_extra(found, seen, f"extra.{name}", value)
        return found

    def _collect_model(self, found: Collected, seen: dict[int, str]) -> dict[int, str]:
        """Collect the model; returns id of parameter -> canonical name."""
        raw = self.state.model.state_dict(keep_vars=True)
        names = self._names(list(raw))
        for name, value in raw.items():
            if isinstance(value, Tensor):
                _add_tensor(found, seen, f"{MODEL}{names[name]}", value)
            else:
                _collect_tree(found, seen, f"{MODEL}{names[name]}", value)
        by_id = {id(value): names[name] for name, value in reversed(raw.items())}
        held = (p for o in self.state.optimizers for g in o.param_groups for p in g["params"])
        if any(id(parameter) not in by_id for parameter in held):
            # Hooks may put other tensors into the state dict than the parameters.
            for name, parameter in named_parameters(self.state.model).items():
                by_id.setdefault(id(parameter), name)
        return by_id

    def _names(self, raw_names: list[str]) -> dict[str, str]:
        if raw_names != self._raw_names:
            self._canonical = canonical_names(self.state.model, raw_names)
            self._raw_names = raw_names
        return self._canonical


@dataclass(frozen=True)
class OptimizerSource:
    """One optimizer to collect.

    Attributes:
        number: among all optimizers.
        names: id of parameter -> canonical name.
        trained: receives the ids of its parameters.
        is_only: whether there is no other.
    """

    number: int
    optimizer: Optimizer
    names: Mapping[int, str]
    trained: set[int]
    is_only: bool


def _collect_optimizer(found: Collected, seen: dict[int, str], source: OptimizerSource) -> None:
    """Collect one optimizer, by the names of its parameters; hooks on its state dict are honoured."""
    packed = source.optimizer.state_dict()
    owner_of: dict[int, str] = {}
    for number, (group, live) in enumerate(
        zip(packed["param_groups"], source.optimizer.param_groups, strict=True)
    ):
        owners = [_owner(source, parameter) for parameter in live["params"]]
        if not owners:
            continue
        slot = f"optimizer.{source.number}.{number}"
        owner_of.update(zip(group["params"], owners, strict=True))
        found.owner_of.update(zip(map(id, live["params"]), owners, strict=True))
        names = owners
        if source.is_only and not any(map(str.isdigit, owners)):
            names = [*owners, str(number)]
            found.objects[f"{PARAM_GROUPS}{number}.params"] = owners
        _collect_group(found, seen, slot, (group, tuple(names)))
    for index, values in packed["state"].items():
        if index not in owner_of:
            raise StateError(
                f"optimizer {source.number} holds state for {index!r}, which is none of its parameters"
            )
        found.owners[owner_of[index]] = list(values)
        prefix = f"{OPTIMIZER_STATE}{owner_of[index]}."
        for name, value in values.items():
            _collect_state_value(found, seen, f"{prefix}{name}", value)


def _owner(source: OptimizerSource, parameter: Tensor) -> str:
    name = source.names.get(id(parameter))
    if name is None:
        raise StateError(
            f"optimizer {source.number} holds a parameter of shape {tuple(parameter.shape)} that is not in the model; "
            "expected all parameters of TrainState(optimizer=...) to belong to TrainState(model=...)"
        )
    if id(parameter) in source.trained:
        raise StateError(
            f"{name} is in two optimizers, or twice in one; its state would be ambiguous"
        )
    source.trained.add(id(parameter))
    return name


def _collect_group(
    found: Collected, seen: dict[int, str], slot: str, group: tuple[dict[str, Any], tuple[str, ...]]
) -> None:
    """Collect the fields of one parameter group."""
    fields, owners = group
    plain = []
    for name, value in fields.items():
        if name in NOT_A_FIELD:
            continue
        if isinstance(value, Tensor):
            # Not late: a scheduler may change it at any time.
            for owner in owners:
                _add_tensor(found, seen, f"{PARAM_GROUPS}{owner}.{name}", value)
        else:
            found.objects[f"{slot}.{name}"] = _plain(value, f"{PARAM_GROUPS}{owners[0]}.{name}")
            plain.append(name)
    found.groups.append(Group(slot=slot, owners=owners, fields=tuple(plain)))


def _collect_state_value(found: Collected, seen: dict[int, str], key: str, value: object) -> None:
    if isinstance(value, Tensor):
        _add_tensor(found, seen, key, value)
        found.late.add(key)
        return
    inner: dict[str, Tensor] = {}
    tree = codec.encode(value, key, inner)
    if inner:
        found.parts[key] = tree
        for path, tensor in inner.items():
            _add_tensor(found, seen, path, tensor)
            found.late.add(path)
    else:
        found.objects[key] = value


def _plain(value: object, key: str) -> object:
    """A value that `torch.load(weights_only=True)` gives back; StateError for any other."""
    inner: dict[str, Tensor] = {}
    codec.encode(value, key, inner)
    if inner:
        raise StateError(f"{key}: tensors inside a container are not supported in parameter groups")
    return value


def _sort_parameters(found: Collected, trained: set[int]) -> None:
    """Tell parameters that change in `optimizer.step()` from those that nothing trains."""
    for key, tensor in found.tensors.items():
        if not key.startswith(MODEL):
            break
        if isinstance(tensor, nn.Parameter):
            is_trained = tensor.requires_grad or id(tensor) in trained
            (found.late if is_trained else found.frozen).add(key)


def _collect_extra(found: Collected, seen: dict[int, str], part: str, value: object) -> None:
    if isinstance(value, PerRank):
        before = {*found.tensors}
        _collect_extra(found, seen, part, value.value)
        found.own.update({part}, {*found.tensors} - before)
    elif isinstance(value, nn.Module):
        raw = value.state_dict(keep_vars=True)
        names = canonical_names(value, list(raw))
        _collect_tree(found, seen, part, {names[name]: item for name, item in raw.items()})
    elif isinstance(value, Stateful):
        _collect_tree(found, seen, part, value.state_dict())
    else:
        _collect_tree(found, seen, part, value)


def _collect_tree(found: Collected, seen: dict[int, str], part: str, value: object) -> None:
    """Collect a tree of plain values and tensors."""
    inner: dict[str, Tensor] = {}
    found.parts[part] = codec.encode(value, part, inner)
    for path, tensor in inner.items():
        _add_tensor(found, seen, path, tensor)


def _add_tensor(found: Collected, seen: dict[int, str], key: str, tensor: Tensor) -> None:
    if key in found.tensors or key in found.aliases:
        raise StateError(f"two values are called {key!r}")
    first = seen.setdefault(id(tensor), key)
    if first != key:
        found.aliases[key] = first
        return
    found.tensors[key] = tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: its shard if it is sharded, else the tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_opaque(local: Tensor) -> bool:
    """Whether a tensor's class, not its memory, says what it holds (a quantised tensor, say): then torch writes the frame."""
    return hasattr(type(local), "__tensor_flatten__") and not isinstance(local, DTensor)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that this rank's part of a tensor is made of."""
    local = local_tensor(tensor)
    if not is_opaque(local):
        yield local
        return
    subclass: Any = local
    names, _ = subclass.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(local, name))


def find_unstorable(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Why a tensor cannot be stored, None if all can."""
    for key, tensor in tensors:
        local = local_tensor(tensor)
        if local.is_meta:
            return f"{key} is on the meta device: it has no values yet (call to_empty() and initialise it)"
        if local.layout != torch.strided:
            return f"{key} has layout {local.layout}; DCP stores dense tensors only"
        if nn.parameter.is_lazy(local):
            return f"{key} is uninitialised: run a forward pass first"
        if isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor.placements):
            return f"{key} holds unreduced partial sums; redistribute it first"
    return None
