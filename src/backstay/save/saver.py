"""Saver: one save after another, from agreement to outcome. The heart of the way out.

Runs in: the training thread; outcomes arrive on the writer's watcher thread, and the staging thread submits. Guarantees: at most one save is
in flight; each save has one outcome, the same on all ranks; after a failure the next save works, with a new writer if the old one is gone.
Assumes: all ranks call `save`, `settle` and `prepare` in the same order.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import xxhash
from torch.distributed.checkpoint.metadata import Metadata

from backstay import points
from backstay.attempts import record_failure, step_dir_name
from backstay.coordination import Coordination, Range
from backstay.errors import (
    BackstayError,
    CommitTimeout,
    RanksDisagree,
    SaveFailed,
    StateError,
    WriterDied,
)
from backstay.events import SaveEvent
from backstay.rng import collect_rng
from backstay.save.commit import Attempt, AttemptFailed, await_outcome
from backstay.save.frozen import FrozenFile, Mark, mark
from backstay.save.image import FileImage
from backstay.save.layout import FROZEN, PAGE_BYTES, TRAINED, file_name, round_up
from backstay.save.messages import (
    AbandonSave,
    AttachImage,
    BeginSave,
    CommitRequest,
    Committed,
    DropImage,
    Failed,
    FileSource,
    Message,
    Note,
    SubmitSave,
    WriterConfig,
    Written,
)
from backstay.save.pending import Flight, PendingCheckpoint, as_error
from backstay.save.plan import Plan, hash_steady, make_plan, object_keys, sign, stored_name
from backstay.save.side import SideImage
from backstay.save.stage import (
    Copies,
    Fence,
    FrameCache,
    Outgrown,
    Places,
    Staging,
    encode_objects,
    lay_out,
)
from backstay.save.writer_process import WriterProcess
from backstay.state import Collected, Collector, TrainState

log = logging.getLogger("backstay")
MAIN_IMAGE, FROZEN_IMAGE = 0, 1
# Beyond the writers' own limits, so that their verdict comes first.
OUTCOME_MARGIN_S = 30.0
KILL_LIMIT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class SaverOptions:
    """How a saver works.

    Attributes:
        staging: "overlap": parameters and optimizer state are copied while forward and backward run. "block": all in `save`.
        trainable_only: leave frozen parameters out of checkpoints.
        commit_timeout_s: limit for writing and committing one checkpoint, all ranks together.
    """

    staging: Literal["overlap", "block"]
    trainable_only: bool
    commit_timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the loop asks to be saved.

    Attributes:
        is_allowed: raises if the root does not admit the step; asked on rank 0 only.
        problem: what is wrong with the request itself; raised on all ranks.
        raise_failures: whether a failure of the save before is raised, instead of only logged.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    is_allowed: Callable[[int], None] = lambda step: None
    problem: BackstayError | None = None
    raise_failures: bool = True


@dataclass
class Cargo:
    """All that has to outlive the call of `save` until the writer has it."""

    side: SideImage
    files: list[FileSource]
    manifest: bytes = b""
    manifest_offset: int = 0
    frozen_image: FileImage | None = None
    frozen_marks: list[Mark] = field(default_factory=list)


class Saver:
    """Saves a train state again and again.

    Args:
        config: of this rank's writer.
        incarnation: eight hex digits that name this run of the program; the same on all ranks.
        versions: go into manifests.
        on_event: called once per save, on some thread; must not raise.
    """

    def __init__(
        self,
        state: TrainState,
        ranks: Coordination,
        *,
        config: WriterConfig,
        options: SaverOptions,
        incarnation: str,
        versions: dict[str, str],
        on_event: Callable[[SaveEvent], None],
    ) -> None:
        self.ranks = ranks
        self.options = options
        self.plan: Plan | None = None
        self.base: str | None = None
        self.fingerprint_base: Callable[[Collected], str] | None = None
        self.frozen = FrozenFile()
        self._root = Path(config.root)
        self._incarnation = incarnation
        self._versions = versions
        self._on_event = on_event
        self._collector = Collector(state)
        self._frames = FrameCache()
        self._image: FileImage | None = None
        self._places: Places | None = None
        self._num_attempts = 0
        self._flight: Flight | None = None
        self._staging: Staging | None = None
        self._lock = threading.Lock()
        self._fence = Fence()
        self.writer = WriterProcess(config, on_message=self._hear, on_death=self._on_death)

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(self, request: Request) -> PendingCheckpoint:
        """Start a save together with all ranks, after the one before has ended.

        Raises:
            RanksDisagree: other ranks ask for another step or root.
            StateError: some rank's state cannot be stored.
            SaveFailed: the save before failed, and nobody knew yet; nothing is saved then, and the next call will save.
        """
        points.reach("save.begin")
        called = time.perf_counter()
        previous = self._drain()
        began = time.perf_counter()
        found, error = None, None
        try:
            found = self._collect(request)
        except (BackstayError, OSError) as caught:
            error = caught
        is_planned = self._agree(request, found, (previous, error))
        assert found is not None, "a rank without a state has raised"
        self._num_attempts += 1
        flight = Flight(
            pending=PendingCheckpoint(request.step),
            attempt=f"{self._incarnation}-{self._num_attempts:04d}",
            began=began,
            numbers={"drained_s": began - called, "is_planned": is_planned},
        )
        self._flight = flight
        try:
            self._begin(flight, request, found)
        except (BackstayError, OSError, RuntimeError) as caught:
            self._abandon(flight, caught)
        flight.numbers["blocked_s"] = time.perf_counter() - began
        self._report(flight)
        return flight.pending

    def settle(self, *, raise_failures: bool = True) -> None:
        """Wait for the save in flight, together with all ranks.

        Raises:
            SaveFailed: it failed.
        """
        previous = self._drain()
        values = self.ranks.agree(_failure_values(previous))
        self._raise_previous(values, previous, raise_failures)

    def drain(self) -> BackstayError | None:
        """Wait for the save in flight on this rank alone; its failure, if nobody knows of it yet."""
        flight = self._drain()
        if flight is None or flight.error is None or flight.pending.committed.is_seen:
            return None
        return flight.error

    @property
    def has_failed(self) -> bool:
        """Whether the last save is known to have failed, and nobody was told."""
        flight = self._flight
        if flight is None or not flight.is_over.is_set():
            return False
        return flight.error is not None and not flight.pending.committed.is_seen

    def prepare(self) -> None:
        """Plan, and start to pre-fault the image in the background, together with all ranks.

        Raises:
            StateError: on all ranks, if the state of some rank cannot be stored.
        """
        found, error = None, None
        try:
            found = self._collector.collect()
        except BackstayError as caught:
            error = caught
        self.ranks.raise_together(error)
        assert found is not None, "a rank without a state has raised"
        self._make_plan(found)
        assert self._image is not None, "a plan comes with an image"
        self._image.prefault(pin_for_cuda=_is_on_cuda(found))

    def adopt_run(self, run_id: str) -> None:
        """Go on as part of that run: retention then counts its checkpoints."""
        self.writer.config = replace(self.writer.config, run_id=run_id)
        self.writer.restart()
        self._attach()

    def link_frozen_from(self, path: Path, metadata: Metadata) -> None:
        """The live frozen parameters were just loaded from this checkpoint: link to its file, if it is laid out as ours would be."""
        if self.plan is None or self._root != path.parent:
            return
        rank, layout = self.ranks.rank, self.plan.rank_plan.layout
        name = f"weights/{file_name(rank, FROZEN)}"
        ours = {piece.name: piece for piece in layout.pieces if piece.file == FROZEN}
        theirs = {
            index.fqn: (place.offset, place.length)
            for index, place in metadata.storage_data.items()
            if place.relative_path == file_name(rank, FROZEN)
        }
        if ours and theirs == {key: (piece.offset, piece.num_bytes) for key, piece in ours.items()}:
            found = self._collector.collect()
            marks = [mark(found.tensors[key]) for key in sorted(found.frozen)]
            self.frozen.settle(f"{path.name}/{name}", marks)

    def close(self) -> None:
        """End the writer and give back all memory; the save in flight, if any, must have been drained."""
        self._fence.remove()
        self.writer.close()
        self._places = None
        if self._image is not None:
            self._image.close()
            self._image = None

    # Agreement --------------------------------------------------------------------------------------------------------

    def _collect(self, request: Request) -> Collected:
        if request.problem is not None:
            raise request.problem
        if self.ranks.rank == 0:
            request.is_allowed(request.step)
        if not self.writer.is_alive:
            log.warning("the writer of rank %d is gone; starting a new one", self.ranks.rank)
            self.writer.restart()
            self._attach()
        return self._collector.collect()

    def _agree(
        self,
        request: Request,
        found: Collected | None,
        failures: tuple[Flight | None, Exception | None],
    ) -> bool:
        """Agree with all ranks that they save the same; whether a new plan was made."""
        previous, error = failures
        points.reach("save.agree")
        place = xxhash.xxh3_64_intdigest(str(self._root).encode()) >> 3
        steady = 0 if found is None or self.plan is None else hash_steady(found, self.plan.own)
        is_stale = found is not None and not self._fits(found)
        values = [request.step, place, int(is_stale), steady, int(error is not None)]
        agreed = self.ranks.agree([*values, *_failure_values(previous)])
        if not (agreed[0].is_same and agreed[1].is_same):
            self._raise_disagreement(request.step)
        self._raise_previous(agreed[5:], previous, request.raise_failures)
        if agreed[4].high:
            self.ranks.raise_exchanged(error)
        if not agreed[2].high and agreed[3].is_same:
            return False
        assert found is not None, "a rank without a state has raised"
        self._make_plan(found)
        return True

    def _fits(self, found: Collected) -> bool:
        """Whether the plan in force holds for what was collected."""
        if self.plan is None or self._places is None or sign(found) != self.plan.signature:
            return False
        try:
            encode_objects(found, self._places.slots, self._frames)
        except Outgrown:
            return False
        return True

    def _raise_disagreement(self, step: int) -> None:
        found = self.ranks.exchange((step, str(self._root)))
        lines = [f"rank {rank}: step {step} in {root}" for rank, (step, root) in enumerate(found)]
        raise RanksDisagree(
            "ranks call save() with different steps or roots; nothing was written. Expected the same on all, found\n"
            + "\n".join(lines[:16])
        )

    def _raise_previous(
        self, agreed: Sequence[Range], previous: Flight | None, raise_failures: bool
    ) -> None:
        """Tell all ranks of a failed save that some of them do not know of, once."""
        if not (agreed[0].high and agreed[1].high):
            return
        error = None if previous is None else previous.error
        try:
            self.ranks.raise_exchanged(error)
        except BackstayError as joint:
            if raise_failures:
                raise
            log.error("%s", joint)  # noqa: TRY400  (the trace is of no use here)

    # Planning ---------------------------------------------------------------------------------------------------------

    def _make_plan(self, found: Collected) -> None:
        own = frozenset() if self.plan is None else self.plan.own
        plan = make_plan(
            found, self.ranks, known_own=own, trainable_only=self.options.trainable_only
        )
        if self.fingerprint_base is not None:
            self.base = self.fingerprint_base(found)
        error = None
        try:
            self._adopt(plan, found)
        except (OSError, BackstayError) as caught:
            error = StateError(f"the file image cannot be set up: {caught}")
        self.ranks.raise_together(error)
        log.info(
            "planned %d tensors of rank %d: %.3f GB here, %.3f GB in all",
            len(found.tensors),
            self.ranks.rank,
            plan.rank_plan.layout.num_bytes / 1e9,
            plan.rank_plan.num_bytes / 1e9,
        )

    def _adopt(self, plan: Plan, found: Collected) -> None:
        layout, metadata = plan.rank_plan.layout, plan.rank_plan.metadata
        tail = round_up(layout.file_bytes[TRAINED], PAGE_BYTES)
        num_bytes = tail + len(metadata)
        self._places = None
        if (
            self._image is None
            or not num_bytes <= self._image.num_bytes <= 1.25 * num_bytes + 2**20
        ):
            if self._image is not None:
                self._image.close()
            self._image = None
            self._image = FileImage(num_bytes)
        self._image.put(tail, metadata)
        names = stored_keys(found, self.ranks.rank, plan.own)
        self._places = lay_out(self._image, layout, TRAINED, names)
        if self.plan is not None and self.plan.rank_plan.layout != layout:
            self.frozen.forget()
        self.plan = plan
        self._attach()

    def _attach(self) -> None:
        if self._image is not None:
            message = AttachImage(image_id=MAIN_IMAGE, num_bytes=self._image.num_bytes)
            self.writer.send(message, [self._image.fd])

    # Staging ----------------------------------------------------------------------------------------------------------

    def _begin(self, flight: Flight, request: Request, found: Collected) -> None:
        """Copy what must be copied now, and set the rest going."""
        assert self.plan is not None, "an agreed save has a plan"
        assert self._places is not None, "and places in its image"
        self.writer.send(BeginSave(attempt=flight.attempt, step=request.step))
        flight.is_begun = True
        cargo = self._load(flight, request, found)
        slots = self._places.slots
        for key, data in encode_objects(found, slots, self._frames).items():
            self._places.image.put(slots[key].piece.offset, data, slots[key].piece.num_bytes)
        early = [key for key in found.tensors if key not in found.late and key not in found.frozen]
        late = Copies.of(found, slots, [*found.late])
        if cargo.frozen_image is not None:
            late = late + self._copy_frozen(found, cargo.frozen_image)
        self._staging = Staging(
            early=Copies.of(found, slots, early),
            late=late,
            on_staged=lambda: self._submit(flight, cargo),
            on_failed=lambda error: self._abandon(flight, error),
        )
        self._fence.guard(self._staging)
        self._staging.begin(block=self.options.staging == "block")

    def _copy_frozen(self, found: Collected, image: FileImage) -> Copies:
        assert self.plan is not None, "an agreed save has a plan"
        names = stored_keys(found, self.ranks.rank, self.plan.own)
        places = lay_out(image, self.plan.rank_plan.layout, FROZEN, names)
        for key, data in encode_objects(found, places.slots, self._frames).items():
            piece = places.slots[key].piece
            image.put(piece.offset, data, piece.num_bytes)
        return Copies.of(found, places.slots, [*found.frozen])

    def _load(self, flight: Flight, request: Request, found: Collected) -> Cargo:
        """Gather all files of this rank: small ones copied, large ones by where they will be."""
        assert self.plan is not None, "an agreed save has a plan"
        assert self._image is not None, "and an image"
        rank, layout = self.ranks.rank, self.plan.rank_plan.layout
        side = SideImage()
        cargo = Cargo(side, [])
        cargo.files.append(side.add_file(f"rng/rank-{rank:05d}.safetensors", "rng", collect_rng()))
        if rank == 0:
            state = side.add_file("state.json", "state", self._encode_state(request.step, found))
            cargo.files.append(state)
            cargo.manifest = self._encode_manifest(request)
            cargo.manifest_offset = side.add(cargo.manifest)
        elif own := {part: tree for part, tree in found.parts.items() if part in self.plan.own}:
            data = json.dumps({"parts": own}).encode()
            cargo.files.append(side.add_file(f"state/rank-{rank:05d}.json", "state", data))
        if layout.file_bytes[TRAINED]:
            path = f"weights/{file_name(rank, TRAINED)}"
            size = layout.file_bytes[TRAINED]
            cargo.files.append(
                FileSource(path=path, role="trainable", num_bytes=size, image_id=MAIN_IMAGE)
            )
        if layout.file_bytes[FROZEN]:
            cargo.files.append(self._frozen_source(found, cargo))
        return cargo

    def _frozen_source(self, found: Collected, cargo: Cargo) -> FileSource:
        assert self.plan is not None, "an agreed save has a plan"
        size = self.plan.rank_plan.layout.file_bytes[FROZEN]
        path = f"weights/{file_name(self.ranks.rank, FROZEN)}"
        tensors = [found.tensors[key] for key in sorted(found.frozen)]
        home = self.frozen.find(tensors)
        if home is not None:
            return FileSource(path=path, role="frozen", num_bytes=size, link_from=home)
        cargo.frozen_image = FileImage(size)
        cargo.frozen_marks = [mark(tensor) for tensor in tensors]
        return FileSource(path=path, role="frozen", num_bytes=size, image_id=FROZEN_IMAGE)

    def _encode_state(self, step: int, found: Collected) -> bytes:
        assert self.plan is not None, "an agreed save has a plan"
        return json.dumps(
            {
                "progress": {"step": step},
                "parts": found.parts,
                "own": sorted(self.plan.own),
                "owners": found.owners,
                "placements": self.plan.placements,
                "frozen": sorted(found.frozen) if self.plan.trainable_only else [],
            }
        ).encode()

    def _encode_manifest(self, request: Request) -> bytes:
        return json.dumps(
            {
                "world_size": self.ranks.world_size,
                "versions": self._versions,
                "metrics": request.metrics,
                "tags": request.tags,
                "base": self.base,
            }
        ).encode()

    def _submit(self, flight: Flight, cargo: Cargo) -> None:
        """All is copied: hand over to the writer."""
        assert self.plan is not None, "an agreed save has a plan"
        flight.numbers["staged_s"] = flight.elapsed_s()
        commit = None
        if self.ranks.rank == 0:
            tail = round_up(self.plan.rank_plan.layout.file_bytes[TRAINED], PAGE_BYTES)
            metadata = FileSource(
                path="weights/.metadata",
                role="metadata",
                num_bytes=len(self.plan.rank_plan.metadata),
                image_id=MAIN_IMAGE,
                offset=tail,
            )
            commit = CommitRequest(
                manifest_offset=cargo.manifest_offset,
                manifest_bytes=len(cargo.manifest),
                metadata=(metadata,),
                events=dict(flight.numbers),
            )
        if cargo.frozen_image is not None:
            image = cargo.frozen_image
            attach = AttachImage(image_id=FROZEN_IMAGE, num_bytes=image.num_bytes)
            self.writer.send(attach, [image.fd])
        flight.frozen_marks = cargo.frozen_marks
        message = SubmitSave(
            attempt=flight.attempt,
            step=flight.step,
            files=tuple(cargo.files),
            side_bytes=cargo.side.num_bytes,
            commit=commit,
        )
        self.writer.send(message, [cargo.side.fd])
        cargo.side.close()
        if cargo.frozen_image is not None:
            # The writer holds the memory now, until the outcome is known.
            cargo.frozen_image.close()
        flight.pending.staged.set_result(None)

    # Outcomes ---------------------------------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        flight = self._flight
        if isinstance(message, Note):
            log.log(logging.getLevelName(message.level.upper()), "%s", message.text)
        if flight is None or getattr(message, "attempt", None) != flight.attempt:
            return
        if isinstance(message, Written):
            flight.written = message
        elif isinstance(message, Committed):
            flight.numbers |= {"num_bytes": message.num_bytes, "unchanged": message.unchanged}
            self._end(flight, None)
        elif isinstance(message, Failed):
            self._fail(flight, message)

    def _on_death(self, status: int) -> None:
        flight = self._flight
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        cause = f"the writer of rank {self.ranks.rank} (pid {self.writer.pid}) {how}"
        if flight is None or flight.is_over.is_set():
            log.error("%s; the next save starts a new one", cause)
            return
        self._end_without_writer(flight, "WriterDied", cause)

    def _end_without_writer(self, flight: Flight, kind: str, cause: str) -> None:
        """Find out, or decide, how a save ended whose writer on this rank can no longer say so."""
        rank = self.ranks.rank
        failed = Failed(attempt=flight.attempt, rank=rank, kind=kind, cause=cause)
        fate = record_failure(
            self._root, flight.attempt, step=flight.step, rank=rank, kind=kind, cause=cause
        )
        if fate == "written":
            attempt = Attempt(root=self._root, name=flight.attempt, step=flight.step)
            try:
                await_outcome(attempt, limit_s=self.options.commit_timeout_s + OUTCOME_MARGIN_S / 2)
                fate = "committed"
            except AttemptFailed as error:
                first = error.failure
                failed = Failed(
                    attempt=flight.attempt, rank=first.rank, kind=first.kind, cause=first.cause
                )
        if fate == "committed":
            self._end(flight, None)
        else:
            self._fail(flight, failed)

    def _abandon(self, flight: Flight, error: Exception) -> None:
        """This rank cannot do its part: see to it that all ranks learn of it. Any thread."""
        if not flight.pending.staged.done():
            flight.pending.staged.set_exception(error)
        cause = (
            str(error) if isinstance(error, BackstayError) else f"{type(error).__name__}: {error}"
        )
        kind = type(error).__name__ if isinstance(error, BackstayError) else "SaveFailed"
        log.error("step %d cannot be saved: %s", flight.step, cause)
        try:
            if not flight.is_begun:
                raise WriterDied(cause)
            self.writer.send(AbandonSave(attempt=flight.attempt, cause=cause))
        except WriterDied:
            self._end_without_writer(flight, kind, cause)

    def _fail(self, flight: Flight, failed: Failed) -> None:
        flight.numbers |= {"kind": failed.kind, "rank": failed.rank, "cause": failed.cause}
        self._end(flight, as_error(flight.step, failed))

    def _end(self, flight: Flight, error: BackstayError | None) -> None:
        """The outcome is known. Any thread; only the first call counts."""
        with self._lock:
            if flight.committed_s is not None:
                return
            flight.committed_s = flight.elapsed_s()
        flight.error = error
        self._settle_frozen(flight)
        if not flight.pending.staged.done():
            flight.pending.staged.set_exception(error or SaveFailed("never staged"))
        if error is None:
            flight.pending.committed.set_result(self._root / step_dir_name(flight.step))
        else:
            flight.pending.committed.set_exception(error)
        self._report(flight)
        flight.is_over.set()

    def _settle_frozen(self, flight: Flight) -> None:
        if flight.frozen_marks:
            if flight.error is None:
                path = f"weights/{file_name(self.ranks.rank, FROZEN)}"
                self.frozen.settle(f"{step_dir_name(flight.step)}/{path}", flight.frozen_marks)
            with suppress(WriterDied):
                self.writer.send(DropImage(image_id=FROZEN_IMAGE))
        elif flight.error is not None:
            # The link may be what failed.
            self.frozen.forget()

    def _report(self, flight: Flight) -> None:
        """Tell of a save once it is over and the call that started it has returned: whichever comes last."""
        with self._lock:
            flight.num_reports += 1
            if flight.num_reports < 2:
                return
        numbers = dict(flight.numbers)
        numbers["blocked_s"] = numbers.get("blocked_s", 0.0) + self._fence.waited_s
        written = flight.written
        if written is not None:
            numbers |= {
                "written_s": written.seconds,
                "hash_s": written.hash_seconds,
                "cpu_s": written.cpu_seconds,
                "gb_per_s": written.num_bytes / max(written.seconds, 1e-9) / 1e9,
            }
        outcome = "committed" if flight.error is None else "failed"
        assert flight.committed_s is not None, "reported when over"
        event = SaveEvent(
            step=flight.step,
            attempt=flight.attempt,
            outcome=outcome,
            committed_s=flight.committed_s,
            **numbers,
        )
        if event.unchanged:
            log.warning(
                "step %d: every trained value is what it was in the checkpoint before. "
                "Either nothing is training, or the model that trains is not the one being saved",
                event.step,
            )
        self._on_event(event)

    def _drain(self) -> Flight | None:
        """Wait until the save in flight is over; returns it."""
        flight = self._flight
        if flight is None:
            return None
        limit_s = self.options.commit_timeout_s + OUTCOME_MARGIN_S
        if not flight.is_over.wait(limit_s):
            log.error(
                "step %d has no outcome after %.0f s; killing its writer", flight.step, limit_s
            )
            self.writer.kill()
            if not flight.is_over.wait(KILL_LIMIT_S):
                cause = f"rank {self.ranks.rank} heard nothing of the save for {limit_s:.0f} s"
                self._end(flight, CommitTimeout(f"step {flight.step}: {cause}"))
        if self._staging is not None:
            self._staging.join(KILL_LIMIT_S)
            self._staging = None
        self._flight = None
        return flight


def stored_keys(found: Collected, rank: int, own: frozenset[str]) -> dict[str, str]:
    """Name as stored -> key of the tensor or slot of the object."""
    names = {stored_name(key, rank, own): key for key in found.tensors}
    return names | {keys[0]: slot for slot, keys in object_keys(found).items()}


def _failure_values(previous: Flight | None) -> list[int]:
    """For the agreement: whether the save before failed, and whether that has not been seen here."""
    is_failed = previous is not None and previous.error is not None
    is_unseen = is_failed and previous is not None and not previous.pending.committed.is_seen
    return [int(is_failed), int(is_unseen)]


def _is_on_cuda(found: Collected) -> bool:
    return any(tensor.is_cuda for tensor in found.tensors.values())
