"""What a run goes on from: found and compared with the present configuration before anything is built or changed."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from backstay.catalog import Catalog
from backstay.errors import CheckpointNotFound, ConfigChanged, UsedRoot
from backstay.load.restore import restore
from backstay.state import TrainState
from backstay.training.config import compare

log = logging.getLogger("backstay")
AUTO, NEVER = "auto", "never"


@dataclass(frozen=True)
class Earlier:
    """A checkpoint to go on from.

    Attributes:
        path: a root, or one checkpoint.
        config: of the run that saved it; empty if it does not say.
        identity: hashes of its model, tokenizer and data; likewise.
    """

    path: Path
    step: int
    config: Mapping[str, Any]
    identity: Mapping[str, Any]


def find_earlier(checkpoints: Path, resume: str) -> Earlier | None:
    """The checkpoint to go on from; called on all ranks. None: start from the base model.

    Args:
        checkpoints: root of the run's own checkpoints.
        resume: "auto", "never", or the path of a checkpoint or a root.

    Raises:
        UsedRoot: "never" in a used directory.
        NoUsableCheckpoint, CheckpointNotFound: there should be one.
    """
    own = Catalog(checkpoints)
    if resume == NEVER:
        if own.list() or own.incomplete():
            raise UsedRoot(
                f"{checkpoints} holds checkpoints, and resume=never would not go on from them. Use another out=..., "
                "move that directory away, or resume=auto"
            )
        return None
    # A run that was itself resumed from elsewhere goes on from its own checkpoints.
    if resume == AUTO or own.list():
        return probe(checkpoints)
    named = probe(Path(resume))
    if named is None:
        raise CheckpointNotFound(
            f"resume={resume}: there is no checkpoint; expected a root of checkpoints, one checkpoint, auto or never"
        )
    return named


def probe(path: Path) -> Earlier | None:
    """Read what a checkpoint says about its run; waits for writers that still work."""
    state = TrainState(model=nn.Module(), extra={"config": {}, "identity": {}})
    step = restore(path, state, strict=False, only=("extra",))
    if step == 0 and not Catalog(path).list() and not (path / ".metadata").exists():
        return None
    return Earlier(path, step, state.extra["config"] or {}, state.extra["identity"] or {})


def check_changes(
    schema: type,
    earlier: Earlier,
    config: Mapping[str, Any],
    identity: Mapping[str, Any],
    *,
    allow: bool,
) -> list[str]:
    """Compare a checkpoint's run with this one.

    Returns:
        What changed, in words.

    Raises:
        ConfigChanged: something that would silently make the result neither of the two runs, unless `allow`.
    """
    changes = compare(schema, earlier.config, config) if earlier.config else []
    broken = [str(change) for change in changes if change.is_fixed]
    if earlier.identity:
        broken += [
            f"content of {name}: {earlier.identity.get(name)} -> {value}"
            for name, value in identity.items()
            if earlier.identity.get(name) != value
        ]
    if broken and not allow:
        raise ConfigChanged(
            f"{earlier.path} (step {earlier.step}) was saved with\n  "
            + "\n  ".join(broken)
            + "\nGoing on would repeat or skip samples, or mix two models. Restore the old values, start in another out=..., "
            "or say allow_changes=true"
        )
    return [*broken, *(str(change) for change in changes if not change.is_fixed)]
