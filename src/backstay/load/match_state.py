"""Which stored value goes to which live place, and everything that does not fit, before anything is changed.

Runs in: the training thread of each rank, for itself.
"""

import torch

from backstay.codec import tensor_paths
from backstay.load.match import Match, MatchOptions, add_part, add_target, note_shared
from backstay.load.match_optimizer import match_optimizer
from backstay.load.stored import Stored
from backstay.state import MODEL, PARAM_GROUPS, Collected, TrainState


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


def match_parts(
    found: Match, part: str, live: Collected, stored: Stored, options: MatchOptions
) -> None:
    """Trees of plain values and tensors: schedulers, the sampler, extras."""
    for name in live.parts:
        if name == part or name.startswith(f"{part}."):
            add_part(found, name, stored, options)
            if name in found.parts:
                add_tree_tensors(found, name, live, stored, options)


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
