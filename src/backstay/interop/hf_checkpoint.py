"""export_checkpoint: a checkpoint as a Hugging Face directory, in one process, without the trainer.

Memory: a few tensors at a time, whatever the size of the checkpoint.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from backstay.errors import CheckpointNotFound, StateError
from backstay.interop.hf_blueprint import Blueprint
from backstay.interop.hf_companions import find_companions
from backstay.interop.hf_draft import check_free
from backstay.interop.hf_file import tensor_bytes
from backstay.interop.hf_options import ExportOptions
from backstay.interop.hf_plan import Spec
from backstay.interop.hf_writing import Writing, absolute
from backstay.load.locate import Place, choose
from backstay.load.reader import read_tensors
from backstay.load.restore import plan_reads
from backstay.load.stored import Stored, read_stored
from backstay.state import MODEL

# How much is read at once, so that small tensors do not cost a call each.
BATCH_BYTES = 16 << 20
# What may lie beside the model in a stock checkpoint whose names have no prefix.
NOT_THE_MODEL = ("optimizer.", "optim.", "state.", "param_groups.")


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    companions: str | os.PathLike[str] | None = None,
    options: ExportOptions = ExportOptions(),  # noqa: B008  (frozen)
) -> Path:
    """Write the model of a checkpoint for others.

    Args:
        checkpoint: directory of one checkpoint, or of all (then the newest whole one), or one that stock DCP wrote.
        out: the directory to make; its parent is made if need be.
        companions: what `save_companions` wrote for this model. None: `companions` beside the directory of all checkpoints.

    Returns:
        `out`.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: there is nothing to read, or it is damaged.
        InvalidArgument: `out` exists, or the companions have to be named.
        StateMismatch: the checkpoint is not of the model that `companions` describes; all differences are named.
        ModelError, StateError: it cannot be exported.
        ExportFailed, OSError: writing failed.
    """
    path = absolute(out)
    check_free(path)
    place = find_place(absolute(checkpoint))
    home = find_companions(place.path) if companions is None else Path(companions)
    blueprint = Blueprint(home)
    weights = StoredWeights(read_stored(place, rank=0, world_size=1), blueprint.specs)
    aliases = find_aliases(weights, blueprint.tied)
    writing = Writing(path, blueprint, options, specs=weights.specs, aliases=aliases)
    try:
        for name, tensor in weights.read(writing.sources):
            writing.put(name, tensor)
        writing.finish()
    finally:
        writing.discard()
    return path


def find_place(path: Path) -> Place:
    """Where the checkpoint is."""
    place = choose(path, step=None, verify="size", wait_s=0.0, rejected={})
    if place is None:
        raise CheckpointNotFound(
            f"{path}: expected a checkpoint (a directory with manifest.json, or .metadata); there is none"
        )
    return place


class StoredWeights:
    """The model's part of a checkpoint.

    Args:
        names: that the model's tensors should have.

    Attributes:
        specs: name in the model -> what is stored.
    """

    def __init__(self, stored: Stored, names: Collection[str]) -> None:
        self._stored = stored
        self._prefix = find_prefix(stored, names)
        self.specs: dict[str, Spec] = {}
        for key in stored.names(self._prefix):
            entry = stored.tensor(key)
            if entry is None or (not self._prefix and key.startswith(NOT_THE_MODEL)):
                continue
            if key in stored.opaque:
                raise StateError(
                    f"{key} is quantised in the checkpoint; dequantise the model and export it live"
                )
            name = key.removeprefix(self._prefix)
            self.specs[name] = Spec(entry.properties.dtype, tuple(entry.size))

    @property
    def is_ours(self) -> bool:
        """Whether a `Checkpointer` wrote it."""
        return self._stored.is_ours

    def place(self, name: str) -> frozenset[tuple[str, int, int]]:
        """Where a tensor's bytes are."""
        return frozenset(self._stored.slices.get(f"{self._prefix}{name}", ()))

    def read(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, in that order."""
        batch: list[str] = []
        num_bytes = 0
        for name in names:
            if batch and num_bytes + self.specs[name].num_bytes > BATCH_BYTES:
                yield from self._read_batch(batch)
                batch, num_bytes = [], 0
            batch.append(name)
            num_bytes += self.specs[name].num_bytes
        yield from self._read_batch(batch)

    def _read_batch(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        targets = {
            f"{self._prefix}{name}": torch.empty(
                self.specs[name].shape, dtype=self.specs[name].dtype
            )
            for name in names
        }
        reads = plan_reads(targets, self._stored.metadata)
        read_tensors(self._stored.place.weights, reads, num_threads=2)
        del reads
        for name in names:
            yield name, targets.pop(f"{self._prefix}{name}")


def find_prefix(stored: Stored, names: Collection[str]) -> str:
    """What stands before the model's own names: nothing in a stock checkpoint of a bare state dict."""
    entries = stored.metadata.state_dict_metadata
    num_nested = sum(f"{MODEL}{name}" in entries for name in names)
    num_bare = sum(name in entries for name in names)
    return "" if num_bare > num_nested and not stored.is_ours else MODEL


def find_aliases(weights: StoredWeights, tied: Mapping[str, str]) -> dict[str, str]:
    """Further name -> first name of tensors that are one: by their place in files, as a `Checkpointer` stores such; a stock checkpoint
    has a copy for each name, so there those are one that the configuration ties and that are equal.
    """
    firsts: dict[frozenset[tuple[str, int, int]], str] = {}
    aliases = {}
    for name in weights.specs:
        place = weights.place(name)
        first = firsts.setdefault(place, name) if place else name
        if first != name:
            aliases[name] = first
    if weights.is_ours:
        return aliases
    pairs = [pair for pair in tied.items() if weights.specs.keys() >= {*pair}]
    for name, source in pairs:
        one, other = (tensor_bytes(tensor) for _, tensor in weights.read([name, source]))
        if one == other:
            aliases[name] = aliases.get(source, source)
    return aliases
