"""What was read, put into place: optimizer state, groups, extra state, schedulers, the data position, random generators.

Runs in: the training thread. Tensors that were alive have their values already: they were read in place.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from backstay import codec
from backstay.coordination import Coordination
from backstay.load.locate import Place
from backstay.load.match import Match, Pending, PendingFrame, replaced
from backstay.load.reader import read_slices
from backstay.load.stored import Slice, Stored, parse_object, read_objects
from backstay.naming import canonical_names
from backstay.rng import derive_rng, restore_rng
from backstay.state import MODEL, Collected, PerRank, TrainState

log = logging.getLogger("backstay")


def put_into_place(state: TrainState, live: Collected, stored: Stored, found: Match) -> None:
    """After all tensors are read: optimizer state, groups, trees."""
    trees: dict[str, Any] = {
        name: codec.decode(tree, found.tensors) for name, tree in found.parts.items()
    }
    waiting = [values for _, _, values in found.state] + [values for _, values in found.fields]
    sources = [v.source for values in waiting for v in values.values() if isinstance(v, Pending)]
    objects = read_objects(stored, sources)
    frames = read_frames(stored, [v for values in waiting for v in values.values()])
    for optimizer, parameter, values in found.state:
        if values:
            optimizer.state[parameter] = replaced(values, objects, trees, frames)
        else:
            optimizer.state.pop(parameter, None)
    for group, values in found.fields:
        group.update(replaced(values, objects, trees, frames))
    put_model(state.model, live, found, trees)
    schedulers = state.schedulers
    for number, scheduler in enumerate(schedulers):
        name = "lr_scheduler" if len(schedulers) == 1 else f"lr_scheduler.{number}"
        if name in trees:
            scheduler.load_state_dict(trees[name])
    if state.sampler is not None and "sampler" in trees:
        state.sampler.load_state_dict(trees["sampler"])
    for name in state.extra:
        if f"extra.{name}" in trees:
            state.extra[name] = put_extra(state.extra[name], trees[f"extra.{name}"])


def read_frames(stored: Stored, values: Iterable[Any]) -> dict[Slice, Tensor]:
    """Tensors of special classes, by where they are stored; only classes registered with torch are admitted."""
    wanted = [value for value in values if isinstance(value, PendingFrame)]
    frames = read_slices(stored.place.weights, [value.place for value in wanted])
    found: dict[Slice, Tensor] = {}
    for value, data in zip(wanted, frames, strict=True):
        local = parse_object(data, f"{stored.place.weights}: {value.source}")
        parameter = value.parameter
        if parameter is not None:
            local = DTensor.from_local(
                local.to(parameter._local_tensor.device),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        found[value.place] = local
    return found


def put_model(model: nn.Module, live: Collected, found: Match, trees: Mapping[str, Any]) -> None:
    """Hand to the model what is no live parameter or buffer: extra state, and what its state-dict hooks made."""
    raw = model.state_dict(keep_vars=True)
    names = canonical_names(model, list(raw))
    owned = {id(each) for each in [*model.parameters(), *model.buffers()]}
    loaded: dict[str, Any] = {}
    needs_load = False
    for name, value in raw.items():
        key = f"{MODEL}{names[name]}"
        if key in trees:
            loaded[name], needs_load = trees[key], True
        elif isinstance(value, Tensor):
            first = live.aliases.get(key, key)
            is_live = id(value) in owned
            loaded[name] = value.detach() if is_live else found.tensors.get(first, value)
            needs_load = needs_load or (not is_live and first in found.tensors)
        else:
            loaded[name] = value
    if needs_load:
        model.load_state_dict(loaded)


def put_extra(current: Any, value: Any) -> Any:
    """Load a value of `extra`; returns what stands in the dict from now on."""
    if isinstance(current, PerRank):
        current.value = put_extra(current.value, value)
        return current
    if isinstance(current, nn.Module):
        raw = list(current.state_dict(keep_vars=True))
        names = canonical_names(current, raw)
        current.load_state_dict({name: value[names[name]] for name in raw})
        return current
    if hasattr(current, "load_state_dict"):
        current.load_state_dict(value)
        return current
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        if value is not current and value.data_ptr() != current.data_ptr():
            return value
        return current
    return value


def put_rng(place: Place, ranks: Coordination) -> None:
    """Restore this rank's generators, or seed new ones where the number of ranks is another."""
    assert place.manifest is not None, "stock checkpoints hold no generators"
    saved = place.manifest.world_size
    path = place.path / "rng" / f"rank-{ranks.rank % saved:05d}.safetensors"
    data = path.read_bytes()
    if saved == ranks.world_size:
        restore_rng(data)
        return
    derive_rng(data, rank=ranks.rank, world_size=ranks.world_size)
    if ranks.rank == 0:
        log.warning(
            "saved on %d ranks, restored on %d: random streams are seeded anew from the saved ones, differently on each rank",
            saved,
            ranks.world_size,
        )
