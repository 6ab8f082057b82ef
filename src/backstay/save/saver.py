"""Saver: one save after another, from agreement to the writer. The heart of the way out.

Runs in: the training thread; the staging thread submits. Guarantees: at most one save is in flight; after a failure the next save works, with a
new writer if the old one is gone. Assumes: all ranks call `save`, `settle` and `prepare` in the same order.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import xxhash
from torch.distributed.checkpoint.metadata import Metadata

from backstay import points
from backstay.attempts import step_dir_name
from backstay.coordination import Coordination, Range
from backstay.errors import BackstayError, RanksDisagree, StateError, WriterDied
from backstay.events import SaveEvent
from backstay.rng import encode_rng, take_rng
from backstay.save.assembled import Assembled
from backstay.save.cargo import Cargo, frozen_tensors
from backstay.save.compare import hash_steady
from backstay.save.frozen import FrozenFile, digest_frozen
from backstay.save.layout import FROZEN, file_name
from backstay.save.messages import AttachImage, BeginSave, DropImage, SubmitSave, WriterConfig
from backstay.save.outcome import KILL_LIMIT_S, Outcomes
from backstay.save.pending import Flight, PendingCheckpoint
from backstay.save.plan import Plan, make_plan
from backstay.save.planned import FROZEN_IMAGE, PlannedImage
from backstay.save.stage import Fence, Staging
from backstay.save.writer_process import WriterProcess
from backstay.state import Collected, Collector, TrainState

log = logging.getLogger("backstay")


@dataclass(frozen=True, kw_only=True)
class SaverOptions:
    """How a saver works.

    Attributes:
        staging: "overlap": parameters and optimizer state are copied while forward and backward run. "block": all in `save`.
        trainable_only: leave frozen parameters out of checkpoints.
        incarnation: eight hex digits that name this run of the program; the same on all ranks.
        versions: go into manifests.
        assembled: a folder of every checkpoint, made of what it stores.
    """

    staging: Literal["overlap", "block"]
    trainable_only: bool
    incarnation: str
    versions: dict[str, str]
    assembled: Assembled | None = None


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


class Saver:
    """Saves a train state again and again.

    Args:
        config: of this rank's writer.
        fingerprint: of frozen parameters, for checkpoints that leave them out.
        on_event: called once per save, on some thread; must not raise.
    """

    def __init__(
        self,
        state: TrainState,
        ranks: Coordination,
        *,
        config: WriterConfig,
        options: SaverOptions,
        fingerprint: Callable[[Collected], str],
        on_event: Callable[[SaveEvent], None],
    ) -> None:
        self._ranks = ranks
        self._options = options
        self._fingerprint = fingerprint
        self._root = Path(config.root)
        self._collector = Collector(state)
        self._frozen = FrozenFile()
        self._base: str | None = None
        self._num_attempts = 0
        self._staging: Staging | None = None
        # One thread for all saves: starting one takes its time, and a thread just started holds the interpreter.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="backstay-stage")
        self._fence = Fence()
        self._outcomes = Outcomes(
            self._root,
            ranks.rank,
            limit_s=config.commit_timeout_s,
            on_end=self._settle_frozen,
            on_event=on_event,
        )
        self._writer = WriterProcess(
            config, on_message=self._outcomes.hear, on_death=self._outcomes.on_death
        )
        self._outcomes.writer = self._writer
        self._planned = PlannedImage(ranks.rank, self._writer.send)

    @property
    def is_planned(self) -> bool:
        """Whether there is a plan."""
        return self._planned.plan is not None

    @property
    def has_failed(self) -> bool:
        """Whether the last save is known to have failed, and nobody was told."""
        return self._outcomes.unseen_failure is not None

    def save(self, request: Request) -> PendingCheckpoint:
        """Start a save together with all ranks, after the one before has ended.

        Raises:
            RanksDisagree: other ranks ask for another step or root.
            StateError: some rank's state cannot be stored.
            SaveFailed: the save before failed, and nobody knew yet; nothing is saved then, and the next call will save.
        """
        called = time.perf_counter()
        previous = self._wait()
        began = time.perf_counter()
        found, error = None, None
        try:
            points.reach("save.begin")
            found = self._collect(request)
            points.reach("save.agree")
        except Exception as caught:  # the user's own state_dict may raise anything, and all ranks have to hear of it
            error = caught
        is_planned = self._agree(request, found, (previous, error))
        assert found is not None, "a rank without a state has raised"
        self._num_attempts += 1
        flight = Flight(
            pending=PendingCheckpoint(request.step),
            attempt=f"{self._options.incarnation}-{self._num_attempts:04d}",
            began=began,
            numbers={"drained_s": began - called, "is_planned": is_planned},
        )
        self._outcomes.flight = flight
        try:
            self._begin(flight, request, found)
        except (BackstayError, OSError, RuntimeError) as caught:
            self._outcomes.abandon(flight, caught)
        flight.numbers["blocked_s"] = time.perf_counter() - began
        self._outcomes.returned(flight)
        return flight.pending

    def settle(self, *, raise_failures: bool = True) -> None:
        """Wait for the save in flight, together with all ranks.

        Raises:
            SaveFailed: it failed.
        """
        previous = self._wait()
        values = self._ranks.agree(_failure_values(previous))
        self._raise_previous(values, previous, raise_failures)

    def drain(self) -> BackstayError | None:
        """Wait for the save in flight on this rank alone; its failure, if nobody knows of it yet."""
        flight = self._wait()
        if flight is None or flight.pending.committed.is_seen:
            return None
        return flight.error

    def prepare(self) -> None:
        """Plan, and start to pre-fault the image in the background, together with all ranks.

        Raises:
            StateError: on all ranks, if the state of some rank cannot be stored.
        """
        found, error = None, None
        try:
            found = self._collector.collect()
        except Exception as caught:  # as in `save`
            error = caught
        self._ranks.raise_together(error)
        assert found is not None, "a rank without a state has raised"
        self._make_plan(found)
        self._rehearse(found)
        is_on_cuda = any(tensor.is_cuda for tensor in found.tensors.values())
        self._planned.prefault(pin_for_cuda=is_on_cuda)

    def _rehearse(self, found: Collected) -> None:
        """Go once through what each save does, so that the first one finds everything loaded and cached."""
        plan = self._planned.plan
        assert plan is not None, "rehearsed after planning"
        self._planned.fits(found)
        self._planned.copies(found)
        hash_steady(found, plan.apart)
        encode_rng(take_rng())
        self._thread.submit(time.monotonic)
        self._ranks.agree([0] * 7)

    def adopt_run(self, run_id: str) -> None:
        """Go on as part of that run: retention then counts its checkpoints."""
        if run_id and run_id != self._writer.config.run_id:
            self._writer.config = replace(self._writer.config, run_id=run_id)
            self._restart_writer()

    def link_frozen_from(self, path: Path, metadata: Metadata) -> None:
        """The live frozen parameters were just loaded from this checkpoint: link to its file, if it is laid out as ours would be."""
        plan, rank = self._planned.plan, self._ranks.rank
        if plan is None or self._root != path.parent:
            return
        ours = {
            p.name: (p.offset, p.num_bytes)
            for p in plan.rank_plan.layout.pieces
            if p.file == FROZEN
        }
        theirs = {
            index.fqn: (place.offset, place.length)
            for index, place in metadata.storage_data.items()
            if place.relative_path == file_name(rank, FROZEN)
        }
        if ours and theirs == ours:
            found = self._collector.collect()
            digest = digest_frozen(frozen_tensors(found))
            self._frozen.settle(f"{path.name}/weights/{file_name(rank, FROZEN)}", digest)

    def close(self) -> None:
        """End the writer and give back all memory; the save in flight, if any, must have been waited for."""
        self._fence.remove()
        self._writer.close()
        self._thread.shutdown(wait=False)
        self._planned.close()

    # Agreement --------------------------------------------------------------------------------------------------------

    def _collect(self, request: Request) -> Collected:
        if request.problem is not None:
            raise request.problem
        if self._ranks.rank == 0:
            request.is_allowed(request.step)
        if not self._writer.is_alive:
            log.warning("the writer of rank %d is gone; starting a new one", self._ranks.rank)
            self._restart_writer()
        return self._collector.collect()

    def _restart_writer(self) -> None:
        self._writer.restart()
        self._planned.attach()

    def _agree(
        self,
        request: Request,
        found: Collected | None,
        failures: tuple[Flight | None, Exception | None],
    ) -> bool:
        """Agree with all ranks that they save the same; whether a new plan was made."""
        previous, error = failures
        plan = self._planned.plan
        place = xxhash.xxh3_64_intdigest(str(self._root).encode()) >> 3
        steady = 0 if found is None or plan is None else hash_steady(found, plan.apart)
        is_stale = found is not None and not self._planned.fits(found)
        values = [request.step, place, int(is_stale), steady, int(error is not None)]
        agreed = self._ranks.agree([*values, *_failure_values(previous)])
        self._raise_previous(agreed[5:], previous, request.raise_failures)
        if agreed[4].high:
            self._ranks.raise_exchanged(error)
        if not (agreed[0].is_same and agreed[1].is_same):
            self._raise_disagreement(request.step)
        if not agreed[2].high and agreed[3].is_same:
            return False
        assert found is not None, "a rank without a state has raised"
        self._make_plan(found)
        return True

    def _raise_disagreement(self, step: int) -> None:
        found = self._ranks.exchange((step, str(self._root)))
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
        try:
            self._ranks.raise_exchanged(None if previous is None else previous.error)
        except BackstayError as joint:
            if raise_failures:
                raise
            log.error("%s", joint)  # noqa: TRY400  (the trace is of no use here)

    def _make_plan(self, found: Collected) -> None:
        before = self._planned.plan
        plan = make_plan(
            found,
            self._ranks,
            known_own=frozenset() if before is None else before.own,
            trainable_only=self._options.trainable_only,
            assembled=self._options.assembled,
        )
        if self._options.trainable_only:
            self._base = self._fingerprint(found)
        error = None
        try:
            self._planned.adopt(plan, found)
        except (OSError, BackstayError) as caught:
            error = StateError(f"the file image cannot be set up: {caught}")
        self._ranks.raise_together(error)
        if before is not None and before.rank_plan.layout != plan.rank_plan.layout:
            self._frozen.forget()
        self._log_plan(found, plan)

    def _log_plan(self, found: Collected, plan: Plan) -> None:
        here, all_ranks = plan.rank_plan.layout.num_bytes, plan.rank_plan.num_bytes
        rank, num_tensors = self._ranks.rank, len(found.tensors)
        log.info(
            "planned %d tensors on rank %d: %.3f GB here, %.3f GB on all ranks",
            num_tensors,
            rank,
            here / 1e9,
            all_ranks / 1e9,
        )

    # Staging ----------------------------------------------------------------------------------------------------------

    def _begin(self, flight: Flight, request: Request, found: Collected) -> None:
        """Copy what must be copied now, and set the rest going."""
        plan = self._planned.plan
        assert plan is not None, "an agreed save has a plan"
        self._writer.send(BeginSave(attempt=flight.attempt, step=request.step))
        flight.is_begun = True
        cargo = Cargo(
            found=found,
            plan=plan,
            rank=self._ranks.rank,
            step=request.step,
            rng=take_rng(),
            manifest=self._manifest(request),
        )
        early, late = self._planned.copies(found)

        def on_copied() -> None:
            cargo.load_frozen(self._frozen)
            if cargo.frozen_image is not None:
                copies = self._planned.frozen_copies(found, cargo.frozen_image)
                copies.run()
                copies.check()

        def on_failed(error: Exception) -> None:
            cargo.close()
            self._outcomes.abandon(flight, error)

        def on_held(seconds: float) -> None:
            flight.held_s += seconds

        self._staging = Staging(
            early=early,
            late=late,
            on_copied=on_copied if found.frozen else None,
            on_staged=lambda: self._submit(flight, cargo),
            on_failed=on_failed,
        )
        self._fence.guard(self._staging, on_held)
        self._staging.begin(self._thread if self._options.staging == "overlap" else None)

    def _manifest(self, request: Request) -> dict[str, object]:
        return {
            "world_size": self._ranks.world_size,
            "versions": self._options.versions,
            "metrics": request.metrics,
            "tags": request.tags,
            "base": self._base,
        }

    def _submit(self, flight: Flight, cargo: Cargo) -> None:
        """All is copied: hand over to the writer."""
        flight.numbers["staged_s"] = flight.elapsed_s()
        cargo.load()
        commit = None
        if self._ranks.rank == 0:
            commit = cargo.commit_request(
                self._planned.metadata_source(), flight.numbers, self._planned.recipes_place()
            )
        if cargo.frozen_image is not None:
            attach = AttachImage(image_id=FROZEN_IMAGE, num_bytes=cargo.frozen_image.num_bytes)
            self._writer.send(attach, [cargo.frozen_image.fd])
            flight.has_frozen_image = True
        flight.frozen_digest = cargo.frozen_digest
        message = SubmitSave(
            attempt=flight.attempt,
            step=flight.step,
            files=tuple(cargo.files),
            side_bytes=cargo.side.num_bytes,
            commit=commit,
        )
        self._writer.send(message, [cargo.side.fd])
        self._outcomes.come_closer(flight)
        cargo.close()

    def _settle_frozen(self, flight: Flight) -> None:
        """The outcome is known: remember where the frozen file lies, or that nobody knows."""
        if flight.error is not None:
            # A link to it may be what failed.
            self._frozen.forget()
        elif flight.frozen_digest:
            path = f"weights/{file_name(self._ranks.rank, FROZEN)}"
            self._frozen.settle(f"{step_dir_name(flight.step)}/{path}", flight.frozen_digest)
        if flight.has_frozen_image:
            with suppress(WriterDied):
                self._writer.send(DropImage(image_id=FROZEN_IMAGE))

    def _wait(self) -> Flight | None:
        flight = self._outcomes.wait()
        if self._staging is not None:
            self._staging.join(KILL_LIMIT_S)
            self._staging = None
        return flight


def _failure_values(previous: Flight | None) -> list[int]:
    """For the agreement: whether the save before failed, and whether that has not been seen here."""
    if previous is None or previous.error is None:
        return [0, 0]
    return [1, int(not previous.pending.committed.is_seen)]
