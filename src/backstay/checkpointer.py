"""Checkpointer: all that a training loop holds. START HERE.

Runs in: the training thread of every rank; every method but `report` is called on all ranks in the same order. Guarantees: each failure is
raised once, on all ranks; leaving the `with` block, `close`, or the end of the process waits for the save in flight, and a process whose last
save failed does not end with status 0.
"""

import atexit
import logging
import os
import platform
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from backstay import points
from backstay.attempts import step_dir_name
from backstay.catalog import Catalog
from backstay.coordination import Coordination
from backstay.errors import (
    BackstayError,
    InvalidArgument,
    RanksDisagree,
    StepExists,
    UsedRoot,
)
from backstay.events import SaveEvent, append_event, table
from backstay.fingerprint import fingerprint_frozen
from backstay.load.restore import RestoreOptions, restore_with
from backstay.manifest import MANIFEST_NAME
from backstay.policies import RetentionPolicy, SavePolicy
from backstay.poll import Poll
from backstay.save.assembled import Assembled
from backstay.save.messages import WriterConfig
from backstay.save.pending import PendingCheckpoint
from backstay.save.saver import Request, Saver, SaverOptions
from backstay.state import TrainState

log = logging.getLogger("backstay")
# With more optimizers than this, each owns a parameter or so and steps during backward: a bad moment to plan.
MAX_HOOKED_OPTIMIZERS = 8
IS_DUE, HAS_FAILED = 1, 2
NUM_FLAGS = 2


class Checkpointer:
    """Saves and restores a train state under one root directory.

    Args:
        root: directory of all checkpoints of the run; the same on all ranks, on a file system that all of them see.
        state: the live objects; never kept beyond what they hold themselves.
        save: when `maybe_save` saves.
        keep: which committed checkpoints stay.
        staging: "overlap": parameters and optimizer state are copied while the next forward and backward run, and the optimizer waits
            for the copy if need be. "block": everything is copied before `save` returns; for loops that change parameters otherwise.
        trainable_only: leave parameters that nothing trains out of the checkpoints, and bind these to the values left out.
        assembled: a folder for other programs in every checkpoint, with a safetensors file of some of its tensors; the writer makes it.
        on_failure: "raise" a failed save at the next call on all ranks, or "warn" and train on. The last save's is always raised.
        on_event: called with a `SaveEvent` per save, on some thread.
        agree_timeout_s: how long ranks wait for each other in each call.
        commit_timeout_s: limit for writing and committing one checkpoint.
        num_threads: parallel writes per rank.
        chunk_bytes: unit of hashing and writing; a multiple of 4096.
        write_slots: how many ranks of one machine may write at once; 0 means all.
        bandwidth_bytes_per_s: cap for each rank's writer; 0 means none.

    Raises:
        RanksDisagree: the ranks were given different roots.
        RankFailed: the root cannot be made or the writer cannot be started.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        state: TrainState,
        *,
        save: SavePolicy | None = None,
        keep: RetentionPolicy | None = None,
        staging: Literal["overlap", "block"] = "overlap",
        trainable_only: bool = False,
        assembled: Assembled | None = None,
        on_failure: Literal["raise", "warn"] = "raise",
        on_event: Callable[[SaveEvent], None] | None = None,
        agree_timeout_s: float = 120.0,
        commit_timeout_s: float = 1800.0,
        num_threads: int = 4,
        chunk_bytes: int = 8 << 20,
        write_slots: int = 0,
        bandwidth_bytes_per_s: int = 0,
    ) -> None:
        check_choice("staging", staging, ("overlap", "block"))
        check_choice("on_failure", on_failure, ("raise", "warn"))
        if not isinstance(state, TrainState):
            raise InvalidArgument(f"expected a TrainState, got a {type(state).__name__}")
        self.root = Path(root).absolute()
        self.state = state
        self.save_policy = save or SavePolicy()
        self.events: list[SaveEvent] = []
        self._on_event = on_event
        self._raises = on_failure == "raise"
        self._ranks = Coordination(timeout_s=agree_timeout_s)
        incarnation, run_id = self._agree_on_identity()
        self._saver: Saver | None = self._start_saver(
            WriterConfig(
                root=str(self.root),
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                run_id=run_id,
                commit_timeout_s=commit_timeout_s,
                num_threads=num_threads,
                chunk_bytes=chunk_bytes,
                write_slots=write_slots,
                bandwidth_bytes_per_s=bandwidth_bytes_per_s,
                retention=asdict(keep or RetentionPolicy()),
                actions=points.dump(),
            ),
            SaverOptions(
                staging=staging,
                trainable_only=trainable_only,
                assembled=assembled,
                incarnation=incarnation,
                versions=versions(),
            ),
        )
        self._is_admitted = False
        self._restored_step: int | None = None
        self._saved_step: int | None = None
        self._pending: PendingCheckpoint | None = None
        self._last_seen: Request | None = None
        self._save_began = time.monotonic()
        self._poll = Poll()
        self._plan_after_first_step()
        self._exit_hook = drain_at_exit(self)

    # The loop ---------------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        verify: Literal["size", "full"] = "size",
        strict: bool = True,
        only: Sequence[str] | None = None,
        convert_dtype: bool = False,
    ) -> int:
        """Load the newest whole checkpoint, or that of `step`, into the live state.

        Args:
            verify: "size" checks that all files are there with their exact sizes; "full" reads and hashes them as well.
            strict: whether values that are missing, unexpected or of another shape are an error.
            only: parts to load: some of "model", "optimizer", "lr_scheduler", "sampler", "extra", "rng".
            convert_dtype: whether a tensor may be stored in another dtype than it has here.

        Returns:
            The step, or 0 if the root holds nothing at all.

        Raises:
            CheckpointNotFound: there is no committed checkpoint of `step`.
            NoUsableCheckpoint: there are checkpoints, but none is whole.
            StateMismatch: checkpoint and live state differ; all differences are named, and nothing is changed.
            BaseMismatch: a `trainable_only` checkpoint was made on other frozen values.
            CorruptCheckpoint: the content is not what its records say.
        """
        saver = self._open_saver()
        saver.settle(raise_failures=self._raises)
        options = RestoreOptions(
            verify=verify, strict=strict, only=only, convert_dtype=convert_dtype
        )
        restored = restore_with(self._ranks, self.root, self.state, step=step, options=options)
        if restored is None:
            return 0
        saver.adopt_run(restored.run_id)
        self._restored_step = self._saved_step = restored.step
        self._last_seen, self._is_admitted = None, False
        saver.prepare()
        saver.link_frozen_from(restored.path, restored.metadata)
        return restored.step

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
    ) -> PendingCheckpoint:
        """Start to save the state as it is after `step`; returns within milliseconds, once the save before has ended.

        Args:
            metrics: numbers for the manifest, by which `RetentionPolicy(best=...)` chooses.
            tags: names for the manifest; a tagged checkpoint stays for ever, unless the policy says otherwise.

        Raises:
            RanksDisagree: other ranks ask for another step.
            StepExists: that step is committed already.
            UsedRoot: the root holds checkpoints that this run did not restore from.
            StateError: the state of some rank cannot be stored.
            SaveFailed: the save before failed; this one was not begun, and the next call will save.
        """
        return self._save(self._request(step, metrics, tags))

    def maybe_save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        tags: Sequence[str] = (),
        now: bool = False,
    ) -> PendingCheckpoint | None:
        """Save if the policy says so; call it after every step. As `save` otherwise.

        Args:
            now: save whatever the policy says, unless this step is saved already.
        """
        saver = self._open_saver()
        self._admit()
        if not saver.is_planned:
            saver.prepare()
        request = self._last_seen = self._request(step, metrics, tags)
        told = self._announce()
        if told & HAS_FAILED:
            saver.settle(raise_failures=self._raises)
        is_due = now or self.save_policy.is_due_by_step(request.step) or bool(told & IS_DUE)
        if not is_due or request.step == self._saved_step:
            return None
        return self._save(request)

    def wait(self) -> None:
        """Wait for the save in flight, on all ranks together.

        Raises:
            SaveFailed: it failed, and not all ranks know yet.
        """
        self._open_saver().settle()

    def close(self) -> None:
        """Wait for the save in flight, then end the writer and give back all memory. Nothing happens at a second call.

        Raises:
            SaveFailed: the save failed.
        """
        if self._saver is None:
            return
        try:
            self._saver.settle()
        finally:
            self._release()

    def report(self) -> str:
        """A table of all saves so far, and the training time lost to them."""
        return table(self.events)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._saver is None:
            return
        if error is None:
            try:
                self._save_last()
            finally:
                self.close()
            return
        # Other ranks may be anywhere: no collective from here on.
        failure = self._drain_and_release()
        if failure is not None and isinstance(error, SystemExit) and error.code in (None, 0):
            raise failure

    # Inside -----------------------------------------------------------------------------------------------------------

    def _agree_on_identity(self) -> tuple[str, str]:
        """Names of this incarnation and of the run, decided by rank 0; the root is made on the way."""
        ranks = self._ranks
        roots = ranks.exchange(str(self.root))
        if len(set(roots)) > 1:
            found = "\n".join(f"rank {rank}: {root}" for rank, root in enumerate(roots[:16]))
            raise RanksDisagree(
                "the ranks were given different roots; expected one directory that all of them see. Decide on one rank and "
                f"broadcast whatever depends on time or host. Found\n{found}"
            )
        identity, error = ("", ""), None
        if ranks.rank == 0:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                entries = Catalog(self.root).list()
                run_id = entries[-1].manifest.run_id if entries else uuid.uuid4().hex
                identity = (uuid.uuid4().hex[:8], run_id)
            except OSError as caught:
                error = caught
        ranks.raise_together(error)
        return ranks.share(identity)

    def _start_saver(self, config: WriterConfig, options: SaverOptions) -> Saver:
        saver, error = None, None
        try:
            saver = Saver(
                self.state,
                self._ranks,
                config=config,
                options=options,
                fingerprint=lambda found: fingerprint_frozen(found, self._ranks),
                on_event=self._take_event,
            )
        except OSError as caught:
            error = caught
        self._ranks.raise_together(error)
        assert saver is not None, "a rank without a saver has raised"
        return saver

    def _open_saver(self) -> Saver:
        if self._saver is None:
            raise InvalidArgument("this Checkpointer is closed; make a new one")
        return self._saver

    def _plan_after_first_step(self) -> None:
        """Optimizers have their state after their first step: plan then, so that even the first save is cheap."""
        self._step_hooks: list[RemovableHandle] = []
        optimizers = self.state.optimizers
        if not 0 < len(optimizers) <= MAX_HOOKED_OPTIMIZERS:
            return
        waiting = {id(optimizer) for optimizer in optimizers}
        me = weakref.ref(self)

        def after_step(optimizer: Optimizer, *_: object) -> None:
            # The hooks stay: torch is just walking through them.
            if not waiting:
                return
            waiting.discard(id(optimizer))
            if waiting:
                return
            checkpointer = me()
            saver = None if checkpointer is None else checkpointer._saver
            if saver is not None and not saver.is_planned:
                saver.prepare()

        self._step_hooks = [each.register_step_post_hook(after_step) for each in optimizers]

    def _admit(self) -> None:
        """Once: refuse a root with checkpoints that this run does not go on from."""
        if self._is_admitted:
            return
        error = None
        if self._ranks.rank == 0:
            error = find_foreign(self.root, self._restored_step)
        self._ranks.raise_together(error)
        self._is_admitted = True

    def _request(
        self, step: int, metrics: Mapping[str, float] | None, tags: Sequence[str]
    ) -> Request:
        try:
            return Request(
                step=check_step(step),
                metrics=check_metrics(metrics or {}),
                tags=check_tags(tags),
                is_allowed=self._check_step_is_free,
                raise_failures=self._raises,
            )
        except InvalidArgument as error:
            return Request(step=-1, problem=error, raise_failures=self._raises)

    def _check_step_is_free(self, step: int) -> None:
        path = self.root / step_dir_name(step)
        if (path / MANIFEST_NAME).exists():
            raise StepExists(
                f"{path} is committed already; a checkpoint is never overwritten. Save another step, or use another root. "
                "If this run did not save it: is another process, perhaps one left over from a killed launcher, still writing there?"
            )

    def _save(self, request: Request) -> PendingCheckpoint:
        saver = self._open_saver()
        self._admit()
        self._last_seen = request
        self._pending = saver.save(request)
        self._save_began = time.monotonic()
        self._saved_step = request.step
        return self._pending

    def _announce(self) -> int:
        """What rank 0's clock, file system and writer say: a broadcast about once a second, and only if the policy needs it."""
        policy = self.save_policy
        if (policy.every_s is None and policy.on_file is None) or not self._poll.is_time():
            return 0
        told = 0
        if self._ranks.rank == 0:
            now = time.monotonic()
            if policy.is_due_by_clock(now - self._save_began) or self._take_request_file():
                told |= IS_DUE
            if self._open_saver().has_failed:
                told |= HAS_FAILED
            horizon_s = float("inf")
            if policy.every_s is not None:
                horizon_s = self._save_began + policy.every_s - now
            told |= self._poll.plan(now, horizon_s) << NUM_FLAGS
        told = self._ranks.announce(told)
        self._poll.num_left = told >> NUM_FLAGS
        return told

    def _take_request_file(self) -> bool:
        name = self.save_policy.on_file
        if name is None:
            return False
        try:
            os.unlink(self.root / name)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s cannot be removed, so it is not obeyed: %s", self.root / name, error)
            return False
        return True

    def _save_last(self) -> None:
        last = self._last_seen
        if self.save_policy.at_end and last is not None and last.step != self._saved_step:
            self._save(last)

    def _take_event(self, event: SaveEvent) -> None:
        self.events.append(event)
        if self._ranks.rank == 0:
            try:
                append_event(self.root, event)
            except OSError as error:
                log.warning("the event of step %d could not be logged: %s", event.step, error)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # the user's code, on a thread where nobody could catch it
                log.exception("on_event raised for step %d", event.step)

    def _drain_and_release(self) -> BackstayError | None:
        """Wait for the save in flight on this rank alone; returns its failure, which is logged."""
        if self._saver is None:
            return None
        failure = self._saver.drain()
        if failure is not None:
            log.error("the last save failed: %s", failure)
        self._release()
        return failure

    def _release(self) -> None:
        saver, self._saver = self._saver, None
        atexit.unregister(self._exit_hook)
        for hook in self._step_hooks:
            hook.remove()
        if saver is not None:
            saver.close()
        self._ranks.close()


def drain_at_exit(checkpointer: Checkpointer) -> Callable[[], None]:
    """Register a hook that finishes the save of a checkpointer that nobody closed; a failure becomes the exit status."""
    me = weakref.ref(checkpointer)

    def hook() -> None:
        alive = me()
        failure = None if alive is None else alive._drain_and_release()
        if failure is not None:
            # An exception here would be printed and forgotten, and the status stay 0.
            print(f"backstay: the last save failed: {failure}", file=sys.stderr)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    atexit.register(hook)
    return hook


def find_foreign(root: Path, restored_step: int | None) -> UsedRoot | None:
    """Why this run may not write under a root; None if it may."""
    steps = [entry.step for entry in Catalog(root).list()]
    if restored_step is None and steps:
        return UsedRoot(
            f"{root} holds checkpoints of steps {shorten(steps)}, which this run did not restore from. "
            "Call restore() before the first save to go on from them, or use another root"
        )
    newer = [step for step in steps if restored_step is not None and step > restored_step]
    if newer:
        return UsedRoot(
            f"this run restored step {restored_step}, but {root} holds the newer steps {shorten(newer)}, which are never overwritten. "
            "Move them away (each is one directory), or use another root"
        )
    return None


def shorten(steps: Sequence[int]) -> str:
    """A few steps in words, however many there are."""
    shown = ", ".join(map(str, steps[-8:]))
    return shown if len(steps) <= 8 else f"..., {shown}"


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """See that an argument is one of a few."""
    if value not in choices:
        expected = " or ".join(map(repr, choices))
        raise InvalidArgument(f"Checkpointer({name}={value!r}): expected {expected}")


def check_step(step: int) -> int:
    """A step as an integer."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InvalidArgument(f"step={step!r}: expected an integer >= 0")
    return step


def check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as plain numbers; tensors and NumPy scalars are taken as well."""
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(
            f"metrics={metrics!r}: expected names and numbers ({error})"
        ) from None


def check_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Tags as a tuple of names."""
    if isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in tags):
        raise InvalidArgument(f"tags={tags!r}: expected a sequence of names")
    return tuple(tags)


def versions() -> dict[str, str]:
    """What made a checkpoint."""
    from backstay import __version__

    return {
        "backstay": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
