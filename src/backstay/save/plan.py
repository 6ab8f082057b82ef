"""What each rank writes: DCP's own planner on all ranks' tensors, laid out, with the finished `.metadata`.

Runs in: the training thread, on all ranks together, once per run and again when the set of tensors changes. Sharding and deduplication
stay DCP's (`DefaultSavePlanner`); here keys are sorted out between ranks, and every offset is fixed before any value is copied.
"""

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor, Shard

from backstay.coordination import Coordination
from backstay.errors import StateError
from backstay.frames import object_frame
from backstay.gc_pause import pause_gc
from backstay.save.assemble import encode_recipes
from backstay.save.assembled import Assembled, Chunk, make_recipes
from backstay.save.compare import Shared, compare_ranks, object_keys, partial_slots
from backstay.save.layout import Layout, file_name, make_layout, slot_bytes
from backstay.state import (
    MODEL,
    OPTIMIZER_STATE,
    PARAM_GROUPS,
    Collected,
    Group,
    find_unstorable,
    is_opaque,
    local_tensor,
)


@dataclass(frozen=True)
class Signature:
    """All that a plan depends on, of this rank; cheap to make and to compare at each save."""

    keys: list[str]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    specs: list[Any]
    aliases: dict[str, str]
    late: set[str]
    frozen: set[str]
    groups: list[Group]
    objects: set[str]
    parts: set[str]
    own: set[str]


@dataclass(frozen=True, kw_only=True)
class LocalPlan:
    """What one rank brings to the planning.

    Attributes:
        plan: DCP's write items.
        frozen: names of parameters that nothing trains.
        slots: see `make_layout`.
        aliases: further name -> name, both as stored.
        placements: see `find_placements`.
        opaque: names of tensors whose class says what they hold.
    """

    plan: SavePlan
    frozen: frozenset[str]
    slots: dict[str, int]
    aliases: dict[str, str]
    placements: dict[str, list[list[Any]]]
    opaque: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What one rank has to write at each save, until something changes.

    Attributes:
        layout: where its frames lie.
        metadata: bytes of DCP's `.metadata`; only on rank 0.
        placements: key of optimizer state -> how it is sharded, where that differs from its parameter; only on rank 0.
        opaque: names of tensors whose class says what they hold; only on rank 0.
        num_bytes: data of all ranks together.
        recipes: of further files, as they travel; only on rank 0.
    """

    layout: Layout
    metadata: bytes = b""
    placements: dict[str, list[list[Any]]] = field(default_factory=dict)
    opaque: frozenset[str] = frozenset()
    num_bytes: int = 0
    recipes: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan in force on this rank.

    Attributes:
        signature: what it holds for.
        own: keys and parts that are stored per rank, as all ranks know them.
        apart: all names that need not be the same on all ranks: those, and what only some ranks have.
    """

    signature: Signature
    rank_plan: RankPlan
    own: frozenset[str]
    apart: frozenset[str]


def sign(found: Collected) -> Signature:
    """The signature of what was collected."""
    tensors = list(found.tensors.values())
    return Signature(
        keys=list(found.tensors),
        dtypes=[tensor.dtype for tensor in tensors],
        shapes=[tensor.shape for tensor in tensors],
        specs=[getattr(tensor, "_spec", None) for tensor in tensors],
        aliases=found.aliases,
        late=found.late,
        frozen=found.frozen,
        groups=found.groups,
        objects={*found.objects},
        parts={*found.parts},
        own=found.own,
    )


def make_plan(
    found: Collected,
    ranks: Coordination,
    *,
    known_own: frozenset[str] = frozenset(),
    trainable_only: bool = False,
    assembled: Assembled | None = None,
) -> Plan:
    """Plan together with all ranks.

    Args:
        known_own: keys and parts that differed between ranks before, and are kept apart from then on.
        assembled: a folder to be made of what is stored; rank 0's counts.

    Raises:
        StateError: on all ranks, if some rank's state cannot be stored, or the ranks' states do not fit together.
    """
    with pause_gc():
        return _make_plan(found, ranks, (known_own, trainable_only), assembled)


def _make_plan(
    found: Collected,
    ranks: Coordination,
    given: tuple[frozenset[str], bool],
    assembled: Assembled | None,
) -> Plan:
    known_own, trainable_only = given
    shared = compare_ranks(found, ranks)
    own = shared.own | known_own
    local, error = None, None
    try:
        local = make_local_plan(
            found, rank=ranks.rank, own=own, shared=shared, trainable_only=trainable_only
        )
    except (StateError, RuntimeError, ValueError) as caught:
        error = caught
    ranks.raise_together(error)
    assert local is not None, "a rank without a plan has an error"
    gathered = ranks.gather(local)
    rank_plans = None
    if gathered is not None:
        try:
            rank_plans = make_rank_plans(gathered, assembled)
        except StateError as caught:
            error = caught
        except (AssertionError, RuntimeError, ValueError) as caught:
            error = StateError(f"the ranks' states do not fit together: {caught}")
    ranks.raise_together(error)
    return Plan(
        signature=sign(found),
        rank_plan=ranks.scatter(rank_plans),
        own=own,
        apart=own | shared.partial | partial_slots(found, shared),
    )


# One rank's part -------------------------------------------------------------------------------------------------------


def make_local_plan(
    found: Collected, *, rank: int, own: frozenset[str], shared: Shared, trainable_only: bool
) -> LocalPlan:
    """DCP's plan for what this rank holds."""
    problem = find_unstorable(found.tensors.items())
    if problem is not None:
        raise StateError(problem)
    tensors = {
        stored_name(key, rank, own): tensor
        for key, tensor in found.tensors.items()
        if not (trainable_only and key in found.frozen)
    }
    slots = {
        name: slot_bytes(len(object_frame(local_tensor(tensor).detach().cpu())))
        for name, tensor in tensors.items()
        if is_opaque(local_tensor(tensor))
    }
    opaque = frozenset(slots)
    state: dict[str, Any] = dict(tensors)
    aliases = {
        stored_name(name, rank, own): stored_name(first, rank, own)
        for name, first in found.aliases.items()
        if stored_name(first, rank, own) in tensors
    }
    for slot, keys in object_keys(found).items():
        if rank == 0 or keys[0] not in shared.on_rank_0:
            state[keys[0]] = None
            slots[keys[0]] = slot_bytes(len(object_frame(found.objects[slot])))
            aliases |= dict.fromkeys(keys[1:], keys[0])
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(state, is_coordinator=rank == 0)
    frozen = frozenset(stored_name(key, rank, own) for key in found.frozen)
    return LocalPlan(
        plan=planner.create_local_plan(),
        frozen=frozen,
        slots=slots,
        aliases=aliases,
        placements=find_placements(found),
        opaque=opaque,
    )


def stored_name(key: str, rank: int, own: frozenset[str]) -> str:
    """The name under which this rank's value is stored: rank 0's copy has the plain key, so that stock DCP finds one."""
    return f"rank_{rank}.{key}" if rank > 0 and key in own else key


def find_placements(found: Collected) -> dict[str, list[list[Any]]]:
    """How optimizer state is sharded where its shape is not its parameter's, since metadata does not say it."""
    placements = {}
    for owner, names in found.owners.items():
        parameter = found.tensors.get(f"{MODEL}{owner}")
        for name in names:
            key = f"{OPTIMIZER_STATE}{owner}.{name}"
            tensor = found.tensors.get(key)
            if not isinstance(tensor, DTensor):
                continue
            if isinstance(parameter, DTensor) and tensor._spec == parameter._spec:
                continue
            placements[key] = [
                ["shard", placement.dim] if isinstance(placement, Shard) else ["replicate"]
                for placement in tensor.placements
            ]
    return placements


# All ranks' parts together, on rank 0 ----------------------------------------------------------------------------------


def make_rank_plans(
    gathered: list[LocalPlan], assembled: Assembled | None = None
) -> list[RankPlan]:
    """Deduplicate with DCP, lay out every rank's items, and build `.metadata`."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([local.plan for local in gathered])
    layouts = [
        make_layout(plan.items, frozen=local.frozen, slots=local.slots)
        for plan, local in zip(plans, gathered, strict=True)
    ]
    storage: dict[MetadataIndex, _StorageInfo] = {}
    chunks: dict[str, list[Chunk]] = {}
    for rank, (plan, layout) in enumerate(zip(plans, layouts, strict=True)):
        for item, piece in zip(plan.items, layout.pieces, strict=True):
            path = file_name(rank, piece.file)
            storage[item.index] = _StorageInfo(path, piece.offset, piece.num_bytes)
            if assembled is not None and item.tensor_data is not None:
                place = item.tensor_data.chunk
                offset = piece.data_offset if piece.dtype is not None else piece.offset
                chunks.setdefault(piece.name, []).append(
                    Chunk(
                        f"weights/{path}", offset, piece.dtype, (*place.offsets,), (*place.sizes,)
                    )
                )
    aliases: dict[str, str] = {}
    placements: dict[str, list[list[Any]]] = {}
    for local in gathered:
        aliases = local.aliases | aliases
        placements |= local.placements
    recipes = b""
    if assembled is not None:
        chunks |= {name: chunks[first] for name, first in aliases.items() if first in chunks}
        metadata_by_name = metadata.state_dict_metadata
        shapes = {
            name: tuple(metadata_by_name[aliases.get(name, name)].size)  # type: ignore[union-attr]
            for name in chunks
        }
        recipes = encode_recipes(make_recipes(assembled, chunks, shapes))
    metadata = finish_metadata(metadata, storage, aliases)
    num_bytes = sum(layout.num_bytes for layout in layouts)
    rank_plans = [RankPlan(layout=layout, num_bytes=num_bytes) for layout in layouts]
    rank_plans[0] = replace(
        rank_plans[0],
        metadata=pickle.dumps(metadata),
        placements=placements,
        recipes=recipes,
        opaque=frozenset().union(*(local.opaque for local in gathered)),
    )
    return rank_plans


def finish_metadata(
    metadata: Metadata, storage: dict[MetadataIndex, _StorageInfo], aliases: Mapping[str, str]
) -> Metadata:
    """Add the places, the further names of shared values, and the nesting that `dcp_to_torch_save` restores."""
    entries = dict(metadata.state_dict_metadata)
    places = dict(storage)
    chunks: dict[str, list[MetadataIndex]] = {}
    wanted = {*aliases.values()}
    for index in storage:
        if index.fqn in wanted:
            chunks.setdefault(index.fqn, []).append(index)
    for name, first in aliases.items():
        entries[name] = entries[first]
        places |= {replace(index, fqn=name): storage[index] for index in chunks[first]}
    return replace(
        metadata,
        state_dict_metadata=entries,
        planner_data={name: tuple(nest(name)) for name in entries},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )


def nest(name: str) -> Iterator[str]:
    """The path of a flat name in the nested form that DCP users know: model.<name>, optimizer.state.<name>.<value>, ..."""
    for prefix in (OPTIMIZER_STATE, PARAM_GROUPS):
        if name.startswith(prefix):
            owner, _, last = name.removeprefix(prefix).rpartition(".")
            yield from prefix.rstrip(".").split(".")
            yield from filter(None, [owner, last])
            return
    head, _, rest = name.partition(".")
    yield from filter(None, [head, rest])
