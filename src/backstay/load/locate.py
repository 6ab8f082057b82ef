"""Which checkpoint to load: decided by rank 0, with the reading for `verify="full"` shared among all ranks.

Decided by what is whole, not by what exists; what had to be passed over is logged with the reason.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from backstay.attempts import parse_step
from backstay.catalog import Catalog, Entry, find_hash_problem, shorten
from backstay.coordination import Coordination, name_ranks
from backstay.errors import (
    BackstayError,
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidArgument,
    NoUsableCheckpoint,
)
from backstay.load.metadata import METADATA_NAME
from backstay.manifest import MANIFEST_NAME, Manifest

log = logging.getLogger("backstay")
WEIGHTS_DIR = "weights"
STATE_NAME = "state.json"
POLL_S = 0.05


@dataclass(frozen=True)
class Place:
    """Where to load from.

    Attributes:
        path: the checkpoint's directory.
        weights: the directory with DCP's files.
        manifest: None for a checkpoint that stock DCP wrote.
    """

    path: Path
    weights: Path
    manifest: Manifest | None

    @property
    def step(self) -> int:
        """Of the checkpoint; stock DCP does not know any."""
        return 0 if self.manifest is None else self.manifest.step

    @property
    def has_state(self) -> bool:
        """Whether a `Checkpointer` wrote it, with everything beside the tensors."""
        return self.manifest is not None and any(
            file.path == STATE_NAME for file in self.manifest.files
        )


def locate(
    ranks: Coordination, path: Path, *, step: int | None, verify: str, wait_s: float
) -> Place | None:
    """Find what to load, together with all ranks.

    Args:
        path: a root, one of our checkpoints, or a stock DCP checkpoint.
        wait_s: how long to wait for writers that still work for a checkpoint whose trainer is gone.

    Returns:
        None if a root holds nothing at all.

    Raises:
        CheckpointNotFound, NoUsableCheckpoint, CorruptCheckpoint, InvalidArgument: on all ranks.
    """
    rejected: dict[Path, str] = {}
    while True:
        place, error = None, None
        if ranks.rank == 0:
            try:
                place = choose(path, step=step, verify=verify, wait_s=wait_s, rejected=rejected)
            except (BackstayError, OSError) as caught:
                error = caught
        ranks.raise_together(error)
        place = ranks.share(place)
        if place is None or place.manifest is None or verify != "full":
            return place
        problem = find_problem(ranks, place, place.manifest)
        if problem is None:
            return place
        if step is not None or place.path == path:
            raise CorruptCheckpoint(f"{place.path}: {problem}")
        log.warning("skipping step %d at %s: %s", place.step, place.path, problem)
        rejected[place.path] = problem


def find_problem(ranks: Coordination, place: Place, manifest: Manifest) -> str | None:
    """Read and hash all files, each on one rank; what is wrong, the same on all ranks."""
    files = manifest.files[ranks.rank :: ranks.world_size]
    problems = [text for file in files if (text := find_hash_problem(place.path, file)) is not None]
    (is_bad,) = ranks.agree([int(bool(problems))])
    if not is_bad.high:
        return None
    return shorten([text for found in ranks.exchange(problems) for text in found])


def choose(
    path: Path, *, step: int | None, verify: str, wait_s: float, rejected: dict[Path, str]
) -> Place | None:
    """The checkpoint to load, as far as names and sizes tell; on rank 0."""
    if verify not in ("size", "full"):
        raise InvalidArgument(f"verify={verify!r}: expected 'size' or 'full'")
    if (path / MANIFEST_NAME).exists():
        return choose_directory(path, step)
    if (path / METADATA_NAME).exists():
        return choose_stock(path, step, verify)
    if (path / WEIGHTS_DIR / METADATA_NAME).exists():
        raise CorruptCheckpoint(f"{path} was never committed: it has no {MANIFEST_NAME}")
    if parse_step(path.name) is not None and not path.exists():
        raise CheckpointNotFound(f"{path}: there is no such checkpoint")
    catalog = Catalog(path)
    wait_for_writers(catalog, wait_s)
    if step is not None:
        return as_place(whole(catalog.get(step)))
    return choose_newest(catalog, rejected)


def choose_stock(path: Path, step: int | None, verify: str) -> Place:
    """A checkpoint that stock DCP wrote."""
    if step is not None:
        raise CheckpointNotFound(
            f"{path} is one stock DCP checkpoint, which records no step; leave out step={step}"
        )
    if verify == "full":
        log.warning("%s has no hashes to verify: stock DCP wrote it", path)
    return Place(path, path, None)


def choose_directory(path: Path, step: int | None) -> Place:
    """A checkpoint that was named by its own directory."""
    manifest = Manifest.from_json((path / MANIFEST_NAME).read_bytes(), source=str(path))
    if step is not None and step != manifest.step:
        raise CheckpointNotFound(f"{path} holds step {manifest.step}, not step {step}")
    return as_place(whole(Entry(step=manifest.step, path=path, manifest=manifest)))


def choose_newest(catalog: Catalog, rejected: dict[Path, str]) -> Place | None:
    """The newest whole checkpoint that was not rejected before."""
    entries, skipped = catalog.scan()
    reasons = [f"step {bad.step}: {bad.reason}" for bad in skipped]
    for bad in skipped:
        log.warning("skipping step %d at %s: %s", bad.step, bad.path, bad.reason)
    for entry in reversed(entries):
        problems = [rejected[entry.path]] if entry.path in rejected else entry.problems()
        if not problems:
            return as_place(entry)
        reasons.append(f"step {entry.step}: {shorten(problems)}")
        if entry.path not in rejected:
            log.warning("skipping step %d at %s: %s", entry.step, entry.path, shorten(problems))
    if reasons:
        raise NoUsableCheckpoint(
            f"{catalog.root} holds checkpoints, but none that is whole; to start from zero, use another root.\n"
            + "\n".join(reasons[:16])
        )
    for attempt in catalog.incomplete():
        log.warning("%s was never committed and is passed over", attempt.path)
    return None


def whole(entry: Entry) -> Entry:
    """The entry itself; CorruptCheckpoint if files are missing or have another size."""
    problems = entry.problems()
    if problems:
        raise CorruptCheckpoint(f"{entry.path}: {shorten(problems)}")
    return entry


def as_place(entry: Entry) -> Place:
    """Where the files of one of our checkpoints are; `interop.dcp` writes them without a directory of their own."""
    has_weights = any(file.path.startswith(f"{WEIGHTS_DIR}/") for file in entry.manifest.files)
    return Place(
        entry.path, entry.path / WEIGHTS_DIR if has_weights else entry.path, entry.manifest
    )


def wait_for_writers(catalog: Catalog, limit_s: float) -> None:
    """Wait for writers that outlived their trainer: what they are finishing is newer than anything there."""
    deadline = time.monotonic() + limit_s
    is_told = False
    while live := catalog.find_live_attempts():
        if not is_told:
            steps = ", ".join(str(attempt.step) for attempt in live)
            log.info("waiting for writers that are still finishing step %s", steps)
            is_told = True
        if time.monotonic() > deadline:
            for attempt in live:
                log.warning(
                    "step %d (attempt %s) is still being written after %.0f s by %s; going on without it",
                    attempt.step,
                    attempt.attempt,
                    limit_s,
                    name_ranks(attempt.ranks),
                )
            return
        time.sleep(POLL_S)
