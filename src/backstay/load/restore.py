"""Restore: locate, match, read, put into place. The only caller of the other parts of `load`.

Runs in: the training thread of all ranks together. Guarantees: whatever does not fit is reported on all ranks before anything is changed; a
failure while reading leaves the state partly loaded, and says so.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from backstay.coordination import Coordination
from backstay.errors import (
    BaseMismatch,
    CorruptCheckpoint,
    InvalidArgument,
    StateMismatch,
)
from backstay.fingerprint import fingerprint_frozen
from backstay.gc_pause import pause_gc
from backstay.load.locate import Place, locate
from backstay.load.match import Match, MatchOptions
from backstay.load.match_state import match
from backstay.load.put import put_into_place, put_rng
from backstay.load.read_item import plan_read
from backstay.load.reader import TensorRead, read_tensors
from backstay.load.stored import Stored, read_stored
from backstay.state import MODEL, PARTS, Collected, Collector, TrainState, local_tensor

log = logging.getLogger("backstay")
MAX_LINES = 40
WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """See `Checkpointer.restore`; `wait_s` is the limit for writers that outlived their trainer."""

    verify: str = "size"
    strict: bool = True
    only: Sequence[str] | None = None
    convert_dtype: bool = False
    wait_s: float = WAIT_S


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was restored.

    Attributes:
        run_id: of the run that saved it; "" for a stock checkpoint.
        metadata: DCP's.
    """

    step: int
    path: Path
    run_id: str
    metadata: Metadata


def restore(
    path_or_root: str | os.PathLike[str],
    state: TrainState,
    step: int | None = None,
    verify: Literal["size", "full"] = "size",
    strict: bool = True,
    *,
    only: Sequence[str] | None = None,
    convert_dtype: bool = False,
    agree_timeout_s: float = 120.0,
) -> int:
    """Load a checkpoint into live objects, outside of a `Checkpointer`. All ranks call.

    Args:
        path_or_root: a root (then the newest whole checkpoint, or that of `step`), the directory of one checkpoint, or a checkpoint
            that stock `torch.distributed.checkpoint` wrote.
        verify, strict, only, convert_dtype: see `Checkpointer.restore`.

    Returns:
        The step; 0 if the root holds nothing at all, and for stock checkpoints, which do not record any.

    Raises:
        CheckpointNotFound, NoUsableCheckpoint, StateMismatch, BaseMismatch, CorruptCheckpoint: see `Checkpointer.restore`.
    """
    options = RestoreOptions(verify=verify, strict=strict, only=only, convert_dtype=convert_dtype)
    ranks = Coordination(timeout_s=agree_timeout_s)
    try:
        restored = restore_with(ranks, Path(path_or_root), state, step=step, options=options)
    finally:
        ranks.close()
    return 0 if restored is None else restored.step


def restore_with(
    ranks: Coordination,
    path: Path,
    state: TrainState,
    *,
    step: int | None,
    options: RestoreOptions,
) -> Restored | None:
    """`restore` among given ranks; None if there is nothing at all."""
    began = time.monotonic()
    parts, error = frozenset[str](), None
    try:
        parts = choose_parts(options.only)
    except InvalidArgument as caught:
        error = caught
    ranks.raise_together(error)
    path = path.absolute()
    place = locate(ranks, path, step=step, verify=options.verify, wait_s=options.wait_s)
    if place is None:
        log.info("%s holds no checkpoint: starting from zero", path)
        return None
    with pause_gc():
        stored = restore_place(ranks, place, state, parts, options)
    log.info("restored step %d from %s in %.2f s", place.step, place.path, time.monotonic() - began)
    run_id = "" if place.manifest is None else place.manifest.run_id
    return Restored(step=place.step, path=place.path, run_id=run_id, metadata=stored.metadata)


def choose_parts(only: Sequence[str] | None) -> frozenset[str]:
    """The parts to load."""
    if only is None:
        return frozenset(PARTS)
    unknown = sorted({*only} - {*PARTS}) if not isinstance(only, str) else [only]
    if unknown:
        raise InvalidArgument(f"only={only!r}: expected a sequence of some of {', '.join(PARTS)}")
    return frozenset(only)


def restore_place(
    ranks: Coordination,
    place: Place,
    state: TrainState,
    parts: frozenset[str],
    options: RestoreOptions,
) -> Stored:
    """Load one checkpoint."""
    stored, live, found, error = None, None, None, None
    try:
        stored = read_stored(place, rank=ranks.rank, world_size=ranks.world_size)
        live = Collector(state).collect()
        wanted = MatchOptions(
            only=parts, strict=options.strict, convert_dtype=options.convert_dtype
        )
        found = match(state, live, stored, wanted)
        check(found, place)
        check_tied(live, stored, found)
    except (
        Exception
    ) as caught:  # the user's own state_dict may raise anything, and all ranks have to hear of it
        error = caught
    ranks.raise_together(error)
    assert stored is not None, "a rank without it has raised"
    assert live is not None, "a rank without it has raised"
    assert found is not None, "a rank without it has raised"
    if "model" in parts:
        check_base(ranks, place, live)
    for note in found.notes[:MAX_LINES]:
        log.warning("%s", note)
    try:
        read_tensors(place.weights, plan_reads(found.targets, stored.metadata))
        put_into_place(state, live, stored, found)
        if "rng" in parts and place.has_state:
            put_rng(place, ranks)
    except Exception as caught:  # likewise the user's load_state_dict
        log.error("the state is now partly loaded: do not train on")  # noqa: TRY400
        error = caught
    ranks.raise_together(error)
    return stored


def check(found: Match, place: Place) -> None:
    """Raise StateMismatch if anything does not fit."""
    if not found.problems:
        return
    shown = found.problems[:MAX_LINES]
    more = len(found.problems) - len(shown)
    rest = [f"and {more} more"] if more else []
    raise StateMismatch(
        f"{place.path} does not fit the live state in {len(found.problems)} places; nothing was changed. "
        "Build the same model and optimizers, choose parts with only=..., or allow missing and unexpected values with strict=False.\n"
        + "\n".join([*shown, *rest])
    )


def check_base(ranks: Coordination, place: Place, live: Collected) -> None:
    """A checkpoint of trainable weights only goes with the frozen weights that it was made on."""
    base = None if place.manifest is None else place.manifest.base
    if not base:
        return
    here = fingerprint_frozen(live, ranks)
    if here != base:
        raise BaseMismatch(
            f"{place.path} holds trainable weights only, made on frozen weights with fingerprint {base}; those here have "
            f"{here or 'none'}. Load the base model that the run started from, bit for bit, and restore again"
        )


def check_tied(live: Collected, stored: Stored, found: Match) -> None:
    """Tied parameters must have one value in the checkpoint, too: else one of two would be lost.

    Raises:
        StateMismatch: they have two.
    """
    for name, first in live.aliases.items():
        if first not in found.tensors or not name.startswith(MODEL):
            continue
        names = [stored.source(first), stored.source(name)]
        if any(stored.tensor(each) is None for each in names):
            continue
        if stored.slices.get(names[0]) == stored.slices.get(names[1]):
            continue
        target = found.tensors[first]
        copies = {each: torch.empty_like(target) for each in names}
        read_tensors(stored.place.weights, plan_reads(copies, stored.metadata))
        one, other = (local_tensor(copy) for copy in copies.values())
        if not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            raise StateMismatch(
                f"{first} and {name} are one tensor here, but the checkpoint holds two different values for them"
            )


def plan_reads(targets: Mapping[str, Tensor], metadata: Metadata) -> list[TensorRead]:
    """What to read for each target: DCP's planner says which part of which chunk goes where.

    Raises:
        CorruptCheckpoint: the stored chunks do not cover a target.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), metadata, is_coordinator=False)
    reads, covered = [], dict.fromkeys(targets, 0)
    for item in planner.create_local_plan().items:
        read = plan_read(item, metadata, planner)
        covered[read.key] += read.target.numel()
        reads.append(read)
    for name, tensor in targets.items():
        if covered[name] != local_tensor(tensor).numel() and is_here(tensor):
            raise CorruptCheckpoint(
                f"{name}: the stored chunks hold {covered[name]} of the {local_tensor(tensor).numel()} elements needed here"
            )
    return reads


def is_here(tensor: Tensor) -> bool:
    """Whether this rank has a part of a tensor."""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None
