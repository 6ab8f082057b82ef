"""What a run goes on from: found and compared with the present configuration before anything is built or changed."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backstay.catalog import Catalog
from backstay.codec import decode
from backstay.coordination import Coordination
from backstay.errors import CheckpointNotFound, ConfigChanged, CorruptCheckpoint, UsedRoot
from backstay.load.locate import STATE_NAME, Place, locate
from backstay.load.restore import WAIT_S
from backstay.load.stored import read_json
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


def find_earlier(checkpoints: Path, resume: str, ranks: Coordination) -> Earlier | None:
    """The checkpoint to go on from; called on all ranks. None: start from the base model.

    Args:
        checkpoints: root of the run's own checkpoints.
        resume: "auto", "never", or the path of a checkpoint or a root.

    Raises:
        UsedRoot: "never" in a used directory.
        NoUsableCheckpoint, CheckpointNotFound: there should be one.
    """
    if resume == NEVER:
        if ranks.share(is_used_root(checkpoints)):
            raise UsedRoot(
                f"{checkpoints} holds checkpoints, and resume=never would not go on from them. Use another out=..., "
                "move that directory away, or resume=auto"
            )
        return None
    own = probe(checkpoints, ranks)
    if own is not None or resume == AUTO:
        return own  # a run that came from elsewhere goes on from its own checkpoints, too
    # Of a file, not even a list of its checkpoints could be made.
    named = probe(Path(resume), ranks) if ranks.share(Path(resume).is_dir()) else None
    if named is None:
        raise CheckpointNotFound(
            f"resume={resume}: there is no checkpoint; expected a root of checkpoints, one checkpoint, auto or never"
        )
    return named


def is_used_root(checkpoints: Path) -> bool:
    """Whether a run has saved there, or begun to."""
    catalog = Catalog(checkpoints)
    return any([*catalog.scan(), catalog.incomplete()])


def probe(path: Path, ranks: Coordination) -> Earlier | None:
    """Read what a checkpoint says about its run; waits for writers that still work."""
    place = locate(ranks, path.absolute(), step=None, verify="size", wait_s=WAIT_S)
    if place is None:
        log.info("%s holds no checkpoint", path)
        return None
    said, error = {}, None
    try:
        said = read_extra(place) if place.has_state else {}
    except CorruptCheckpoint as caught:
        error = caught
    ranks.raise_together(error)
    return Earlier(path, place.step, said.get("config", {}), said.get("identity", {}))


def read_extra(place: Place) -> dict[str, Any]:
    """The plain values in `extra` of a checkpoint.

    Raises:
        CorruptCheckpoint: its state cannot be read.
    """
    parts = read_json(place.path / STATE_NAME).get("parts", {})
    names = [name for name in ("config", "identity") if f"extra.{name}" in parts]
    return {name: decode(parts[f"extra.{name}"], {}) for name in names}


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
