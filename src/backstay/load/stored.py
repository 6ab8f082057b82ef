"""What one checkpoint holds, by name: DCP's metadata and our `state.json`, without reading any tensor."""

import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from backstay.codec import Json
from backstay.errors import CorruptCheckpoint
from backstay.load.locate import STATE_NAME, Place
from backstay.load.metadata import read_metadata
from backstay.load.reader import read_slices
from backstay.state import MODEL, OPTIMIZER_STATE, PARAM_GROUPS

_GROUP_MEMBERS = re.compile(re.escape(PARAM_GROUPS) + r"(\d+)\.params")
Slice = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Everything that a checkpoint says about itself.

    Attributes:
        place: where it is.
        metadata: DCP's.
        parts: name -> encoded tree, as this rank is to see it.
        own: keys and parts that were stored per rank.
        owners: canonical name -> names of its optimizer's state values; None for a stock checkpoint, which does not list them.
        placements: see `save.plan.find_placements`.
        opaque: names of tensors whose class says what they hold.
        rank, is_same_world: this rank, and whether as many ranks saved.
        slices: name -> where its chunks lie.
        groups: canonical name -> field of its parameter group -> name as stored.
    """

    place: Place
    metadata: Metadata
    parts: dict[str, Json] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    owners: dict[str, list[str]] | None = None
    placements: dict[str, list[list[Any]]] = field(default_factory=dict)
    opaque: frozenset[str] = frozenset()
    rank: int = 0
    is_same_world: bool = True
    slices: dict[str, set[Slice]] = field(default_factory=dict)
    groups: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether a `Checkpointer` wrote it."""
        return self.place.has_state

    def source(self, key: str) -> str:
        """The name under which this rank's value of `key` is stored."""
        if self.rank > 0 and self.is_same_world and key in self.own:
            return f"rank_{self.rank}.{key}"
        return key

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Metadata of a tensor, None if there is none of that name."""
        entry = self.metadata.state_dict_metadata.get(name)
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def is_object(self, name: str) -> bool:
        """Whether a Python object is stored under that name."""
        return isinstance(self.metadata.state_dict_metadata.get(name), BytesStorageMetadata)

    def names(self, prefix: str) -> list[str]:
        """Stored names that begin with `prefix`."""
        return [name for name in self.metadata.state_dict_metadata if name.startswith(prefix)]

    def fields(self, owner: str) -> dict[str, str]:
        """Field of the parameter group of `owner` -> name as stored."""
        return self.groups.get(owner, {})


def read_stored(place: Place, *, rank: int, world_size: int) -> Stored:
    """Read what a checkpoint says about itself.

    Raises:
        CorruptCheckpoint: it cannot be understood.
    """
    metadata = name_flat(read_metadata(place.weights))
    slices: dict[str, set[Slice]] = {}
    for index, info in metadata.storage_data.items():
        slices.setdefault(index.fqn, set()).add((info.relative_path, info.offset, info.length))
    stored = Stored(place=place, metadata=metadata, rank=rank, slices=slices)
    stored = replace(stored, groups=find_groups(stored))
    if place.manifest is None or not place.has_state:
        return stored
    document = read_json(place.path / STATE_NAME)
    is_same_world = place.manifest.world_size == world_size
    own_path = place.path / "state" / f"rank-{rank:05d}.json"
    try:
        parts = dict(document["parts"])
        if rank > 0 and is_same_world and own_path.exists():
            parts |= read_json(own_path)["parts"]
        return replace(
            stored,
            parts=parts,
            own=frozenset(document["own"]),
            owners=document["owners"],
            placements=document["placements"],
            opaque=frozenset(document.get("opaque", ())),
            is_same_world=is_same_world,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(
            f"{place.path / STATE_NAME}: not what Backstay writes ({error!r})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{path}: expected a JSON object, found a {type(found).__name__}")
    return found


def name_flat(metadata: Metadata) -> Metadata:
    """Give a stock checkpoint of a bare model state dict the names that ours have."""
    names = metadata.state_dict_metadata
    if any(name.startswith((MODEL, OPTIMIZER_STATE, PARAM_GROUPS)) for name in names):
        return metadata

    def renamed(index: MetadataIndex) -> MetadataIndex:
        return replace(index, fqn=f"{MODEL}{index.fqn}")

    return replace(
        metadata,
        state_dict_metadata={f"{MODEL}{name}": entry for name, entry in names.items()},
        storage_data={renamed(index): info for index, info in metadata.storage_data.items()},
    )


def find_groups(stored: Stored) -> dict[str, dict[str, str]]:
    """The fields of each parameter's group, whether they are stored by parameter or, as stock DCP also does, by number of the group.

    Raises:
        CorruptCheckpoint: parameters are numbered there, so that nobody knows which is which.
    """
    groups: dict[str, dict[str, str]] = {}
    members = [name for name in stored.names(PARAM_GROUPS) if _GROUP_MEMBERS.fullmatch(name)]
    for name, owners in read_objects(stored, [] if stored.is_ours else members).items():
        prefix = name.removesuffix("params")
        if not isinstance(owners, list) or not all(isinstance(owner, str) for owner in owners):
            raise CorruptCheckpoint(
                f"{stored.place.path}: the optimizer state is that of optimizer.state_dict(), which numbers parameters; "
                "expected names, as torch.distributed.checkpoint.state_dict.get_state_dict gives"
            )
        fields = {each.removeprefix(prefix): each for each in stored.names(prefix)}
        fields.pop("params")
        for owner in owners:
            groups[owner] = fields
    if stored.is_ours or not members:
        for full in stored.names(PARAM_GROUPS):
            owner, _, key = full.removeprefix(PARAM_GROUPS).rpartition(".")
            groups.setdefault(owner, {})[key] = full
    return groups


def read_objects(stored: Stored, names: Iterable[str]) -> dict[str, Any]:
    """The small Python objects stored under `names`; only plain values are admitted.

    Raises:
        CorruptCheckpoint: one is something else.
    """
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in stored.slices:
            raise CorruptCheckpoint(
                f"{stored.place.weights}: the metadata gives no place for {name}"
            )
    places = [next(iter(stored.slices[name])) for name in wanted]
    frames = read_slices(stored.place.weights, places)
    cache: dict[bytes, Any] = {}
    found = {}
    for name, frame in zip(wanted, frames, strict=True):
        if frame not in cache:
            cache[frame] = parse_object(frame, f"{stored.place.weights}: {name}")
        found[name] = cache[frame]
    return found


def parse_object(frame: bytes, source: str) -> Any:
    """The object in a frame, by torch's restricted unpickler."""
    try:
        return torch.load(io.BytesIO(frame), weights_only=True, map_location="cpu")
    except Exception as error:  # hostile bytes may raise anything; none of it is ours to tell apart
        raise CorruptCheckpoint(
            f"{source} is no plain value, nor of a class registered with torch.serialization.add_safe_globals, and nothing "
            f"else is loaded. If a library defines it, import that library before restoring. ({error})"
        ) from error
