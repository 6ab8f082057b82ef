"""export_model: a live model, sharded or not, as a Hugging Face directory.

Runs in: the training thread of all ranks together. Guarantees: an error of any rank is raised on all, also while rank 0 cannot write
and the others gather; the live model is only read. Memory: a rank holds one whole tensor at a time, or, where transformers converts
several into one, those.
"""

import os
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from backstay.coordination import Coordination
from backstay.errors import RanksDisagree, StateError
from backstay.interop.hf_blueprint import Blueprint, spec_of
from backstay.interop.hf_draft import check_free
from backstay.interop.hf_options import ExportOptions
from backstay.interop.hf_writing import Writing, absolute
from backstay.naming import canonical_names
from backstay.state import find_unstorable, is_opaque, local_tensor

# How much may be gathered before all ranks ask each other whether to go on: little, as the others wait while rank 0 writes.
AGREE_BYTES = 256 << 20
# Canonical name -> live tensor, whole or this rank's part.
Tensors = dict[str, Tensor]


def export_model(
    model: nn.Module,
    out: str | os.PathLike[str],
    *,
    companions: str | os.PathLike[str],
    options: ExportOptions = ExportOptions(),  # noqa: B008  (frozen)
    ranks: Coordination,
) -> Path:
    """Write a live transformers model for others; all ranks call.

    Args:
        model: plain, compiled, or sharded (FSDP2, HSDP, tensor-parallel); on rank 0 the values of what is not sharded.
        out: the directory to make; its parent is made if need be.
        companions: what `save_companions` wrote for this model; only rank 0 reads it.
        ranks: all ranks; their time limit must suffice for writing the largest tensor.

    Returns:
        `out`.

    Raises:
        InvalidArgument: `out` exists.
        StateMismatch: the model is not the one that `companions` describes; all differences are named.
        ModelError, StateError: it cannot be exported.
        ExportFailed, RankFailed: writing failed.
        RanksDisagree: the ranks call with different models or paths.
    """
    path = absolute(out)
    live, error = {}, None
    try:
        live = collect(model)
    except (
        Exception
    ) as caught:  # the model's own state_dict may raise anything, and all ranks have to hear of it
        error = caught
    ranks.raise_together(error)
    check_agreement(path, live, ranks)
    writing = begin(path, Path(companions), options, live=live, ranks=ranks)
    try:
        stream(live, writing, ranks)
    finally:
        if writing is not None:
            writing.discard()
    return path


def collect(model: nn.Module) -> Tensors:
    """The tensors of a model, under all their names.

    Raises:
        StateError: some are of a kind that cannot be exported.
    """
    raw = model.state_dict(keep_vars=True)
    names = canonical_names(model, list(raw))
    live: Tensors = {}
    for name, value in raw.items():
        if not isinstance(value, Tensor):
            raise StateError(
                f"{names[name]}: expected a tensor in the model's state, found a {type(value).__name__}"
            )
        if is_opaque(local_tensor(value)):
            raise StateError(
                f"{names[name]} is a {type(local_tensor(value)).__name__}; dequantise the model before exporting it"
            )
        live[names[name]] = value
    problem = find_unstorable(live.items())
    if problem is not None:
        raise StateError(problem)
    return live


def find_aliases(live: Tensors) -> dict[str, str]:
    """Further name -> first name of tensors that are one."""
    firsts: dict[int, str] = {}
    return {
        name: first
        for name, tensor in live.items()
        if (first := firsts.setdefault(id(tensor), name)) != name
    }


def check_agreement(path: Path, live: Tensors, ranks: Coordination) -> None:
    """See that all ranks are about to do the same.

    Raises:
        RanksDisagree: they are not.
    """
    text = repr((str(path), [(name, spec_of(tensor)) for name, tensor in live.items()]))
    (mark,) = ranks.agree([xxhash.xxh3_64_intdigest(text.encode()) >> 3])
    if not mark.is_same:
        raise RanksDisagree(
            f"ranks call export_model() with different paths or models (here {path}, {len(live)} tensors); nothing was written"
        )


def begin(
    path: Path, companions: Path, options: ExportOptions, *, live: Tensors, ranks: Coordination
) -> Writing | None:
    """Plan on rank 0."""
    writing, error = None, None
    if ranks.rank == 0:
        specs = {name: spec_of(tensor) for name, tensor in live.items()}
        try:
            check_free(path)
            blueprint = Blueprint(companions)
            writing = Writing(path, blueprint, options, specs=specs, aliases=find_aliases(live))
        except Exception as caught:  # of transformers as well; the others wait
            error = caught
    ranks.raise_together(error)
    return writing


def stream(live: Tensors, writing: Writing | None, ranks: Coordination) -> None:
    """Gather one tensor after the other, and write it on rank 0. A rank that failed goes on gathering until all know of it."""
    sources = ranks.share(writing.sources if writing is not None else [])
    error: Exception | None = None
    num_bytes = 0
    for name in sources:
        try:
            whole = gather(live[name])
            if writing is not None and error is None:
                writing.put(name, whole)
        except Exception as caught:  # not to leave the others alone in a collective operation
            error = error or caught
        num_bytes += spec_of(live[name]).num_bytes
        if num_bytes >= AGREE_BYTES:
            ranks.raise_together(error)
            num_bytes = 0
    if writing is not None and error is None:
        try:
            writing.finish()
        except Exception as caught:  # likewise
            error = caught
    ranks.raise_together(error)


@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """The whole tensor; collective for sharded ones."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()
