"""Canonical names: those that the user's own module tree gives, whatever wraps it.

`torch.compile`, activation checkpointing, DDP and FSDP insert a segment into the dotted path; a checkpoint must not depend
on them. A user's own submodule called `module` stays, because only segments that a wrapper put there are dropped.
"""

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from backstay.errors import StateError

_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical_names(module: nn.Module, names: list[str]) -> dict[str, str]:
    """Map each of `names` (dotted paths in `module`, as in its state dict) to its canonical form.

    Raises:
        StateError: two names become the same.
    """
    parallel = tuple(
        path
        for path, child in module.named_modules()
        if isinstance(child, (DataParallel, DistributedDataParallel))
    )
    canonical: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        clean = _canonical(name, parallel)
        if clean in owner:
            raise StateError(
                f"{name!r} and {owner[clean]!r} are both called {clean!r} once wrappers are taken off"
            )
        owner[clean] = name
        canonical[name] = clean
    return canonical


def _canonical(name: str, parallel: tuple[str, ...]) -> str:
    segments = name.split(".")
    kept = []
    for index, segment in enumerate(segments):
        if segment in _WRAPPER_SEGMENTS:
            continue
        if segment == "module" and parallel and ".".join(segments[:index]) in parallel:
            continue
        kept.append(segment)
    return ".".join(kept)


def named_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Canonical name -> parameter; a tied parameter appears once, under its first name."""
    raw = dict(module.named_parameters())
    canonical = canonical_names(module, list(raw))
    return {canonical[name]: parameter for name, parameter in raw.items()}
