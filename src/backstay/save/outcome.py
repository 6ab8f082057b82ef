"""Outcomes: how the save in flight ends, whoever says so: its writer, the other ranks' records, or a clock.

Runs in: the training thread (`start`, `wait`), the writer's watcher thread (`hear`, `on_death`), the staging thread (`abandon`).
Guarantees: each save has one outcome, the same on all ranks; it is known within the writers' limits and a margin.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from backstay.attempts import record_failure, step_dir_name
from backstay.errors import BackstayError, CommitTimeout, SaveFailed, WriterDied
from backstay.events import SaveEvent
from backstay.save.commit import Attempt, AttemptFailed, await_outcome
from backstay.save.messages import AbandonSave, Begun, Committed, Failed, Message, Note, Written
from backstay.save.pending import Flight, as_error
from backstay.save.writer_process import WriterProcess

log = logging.getLogger("backstay")
# Beyond the writers' own limits, so that their verdict comes first.
OUTCOME_MARGIN_S = 30.0
KILL_LIMIT_S = 15.0


class Outcomes:
    """Follows one save at a time.

    Args:
        limit_s: of the writers, for writing and committing.
        on_end: called once per save when its outcome is known, before anybody else learns of it.
        on_event: called once per save with its event.
    """

    def __init__(
        self,
        root: Path,
        rank: int,
        *,
        limit_s: float,
        on_end: Callable[[Flight], None],
        on_event: Callable[[SaveEvent], None],
    ) -> None:
        self.flight: Flight | None = None
        self.writer: WriterProcess | None = None
        self._root = root
        self._rank = rank
        self._limit_s = limit_s
        self._on_end = on_end
        self._on_event = on_event
        self._lock = threading.Lock()

    @property
    def unseen_failure(self) -> BackstayError | None:
        """Why the last save failed, if it did and nobody looked."""
        flight = self.flight
        if flight is None or not flight.is_over.is_set() or flight.pending.committed.is_seen:
            return None
        return flight.error

    def wait(self) -> Flight | None:
        """Wait until the save in flight is over; returns it, once."""
        flight = self.flight
        if flight is None:
            return None
        limit_s = self._limit_s + OUTCOME_MARGIN_S
        if not flight.is_over.wait(limit_s):
            log.error("step %d: no outcome after %.0f s; killing its writer", flight.step, limit_s)
            if self.writer is not None:
                self.writer.kill()
            if not flight.is_over.wait(KILL_LIMIT_S):
                cause = f"rank {self._rank} heard nothing of the save for {limit_s:.0f} s"
                self._end(flight, CommitTimeout(f"step {flight.step} was not committed: {cause}"))
        self.flight = None
        return flight

    def abandon(self, flight: Flight, error: Exception) -> None:
        """This rank cannot do its part: see to it that all ranks learn of it."""
        is_ours = isinstance(error, BackstayError)
        cause = str(error) if is_ours else f"{type(error).__name__}: {error}"
        log.error("step %d cannot be saved: %s", flight.step, cause)
        try:
            if self.writer is None or not flight.is_begun:
                raise WriterDied(cause)
            self.writer.send(AbandonSave(attempt=flight.attempt, cause=cause))
        except WriterDied:
            self._end_without_writer(
                flight, type(error).__name__ if is_ours else "SaveFailed", cause
            )

    def hear(self, message: Message) -> None:
        """A message of the writer."""
        if isinstance(message, Note):
            log.log(logging.getLevelName(message.level.upper()), "%s", message.text)
        flight = self.flight
        if flight is None or getattr(message, "attempt", None) != flight.attempt:
            return
        if isinstance(message, Begun):
            self.come_closer(flight)
        elif isinstance(message, Written):
            flight.written = message
        elif isinstance(message, Committed):
            flight.numbers |= {"num_bytes": message.num_bytes, "unchanged": message.unchanged}
            self._end(flight, None)
        elif isinstance(message, Failed):
            self._fail(flight, message)

    def on_death(self, status: int) -> None:
        """The writer ended unasked."""
        flight = self.flight
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        pid = -1 if self.writer is None else self.writer.pid
        cause = f"the writer of rank {self._rank} (pid {pid}) {how}"
        if flight is None or flight.is_over.is_set():
            log.error("%s; the next save starts a new one", cause)
        else:
            self._end_without_writer(flight, "WriterDied", cause)

    def come_closer(self, flight: Flight) -> None:
        """One of the two things has happened that make a save staged."""
        with self._lock:
            flight.num_steps_to_staged -= 1
            if flight.num_steps_to_staged == 0 and not flight.pending.staged.done():
                flight.pending.staged.set_result(None)

    def returned(self, flight: Flight) -> None:
        """The call that started the save has returned."""
        self._report(flight)

    def _end_without_writer(self, flight: Flight, kind: str, cause: str) -> None:
        """Find out, or decide, how a save ended whose writer on this rank can no longer say so."""
        failed = Failed(attempt=flight.attempt, rank=self._rank, kind=kind, cause=cause)
        fate = record_failure(
            self._root, flight.attempt, step=flight.step, rank=self._rank, kind=kind, cause=cause
        )
        if fate == "written":
            attempt = Attempt(root=self._root, name=flight.attempt, step=flight.step)
            try:
                await_outcome(attempt, limit_s=self._limit_s + OUTCOME_MARGIN_S / 2)
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

    def _fail(self, flight: Flight, failed: Failed) -> None:
        flight.numbers |= {"kind": failed.kind, "rank": failed.rank, "cause": failed.cause}
        self._end(flight, as_error(flight.step, failed))

    def _end(self, flight: Flight, error: BackstayError | None) -> None:
        """The outcome is known; only the first call counts."""
        with self._lock:
            if flight.committed_s is not None:
                return
            flight.committed_s = flight.elapsed_s()
        flight.error = error
        self._on_end(flight)
        with self._lock:
            if not flight.pending.staged.done():
                cause = error or SaveFailed(f"step {flight.step} ended before it was staged")
                flight.pending.staged.set_exception(cause)
        if error is None:
            flight.pending.committed.set_result(self._root / step_dir_name(flight.step))
        else:
            flight.pending.committed.set_exception(error)
        self._report(flight)
        flight.is_over.set()

    def _report(self, flight: Flight) -> None:
        """Tell of a save once it is over and the call that started it has returned: whichever comes last."""
        with self._lock:
            flight.num_reports += 1
            if flight.num_reports < 2:
                return
        event = flight.event()
        if event.unchanged:
            log.warning(
                "step %d: every trained value is what it was in the checkpoint before. "
                "Either nothing is training, or the model that trains is not the one being saved",
                event.step,
            )
        self._on_event(event)
