"""A save under way, as the training loop holds it, and as the saver follows it to its end."""

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backstay import errors
from backstay.errors import BackstayError, SaveFailed
from backstay.events import SaveEvent
from backstay.save.messages import Failed, Written


class Outcome(Future[Path]):
    """The future of a commit; remembers whether anybody looked at its failure."""

    is_seen = False

    def result(self, timeout: float | None = None) -> Path:
        """Directory of the committed checkpoint; raises what made the save fail."""
        try:
            return super().result(timeout)
        finally:
            self.is_seen = self.is_seen or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What made the save fail, None if it is committed."""
        try:
            return super().exception(timeout)
        finally:
            self.is_seen = self.is_seen or self.done()


@dataclass(frozen=True)
class PendingCheckpoint:
    """A save that was started.

    Attributes:
        step: of the checkpoint.
        staged: done when all values are copied and in the writer's hands; whatever happens to the live state, or to this process,
            they will be written, and a restart will wait for them.
        committed: done when the checkpoint is published; its result is the directory. Raises `SaveFailed`, or a subclass.
    """

    step: int
    staged: Future[None] = field(default_factory=Future)
    committed: Outcome = field(default_factory=Outcome)

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait for the commit; not collective.

        Returns:
            The checkpoint's directory.

        Raises:
            SaveFailed: it was not committed.
            TimeoutError: not within `timeout_s`; the save goes on.
        """
        return self.committed.result(timeout_s)


@dataclass(kw_only=True)
class Flight:
    """What the saver knows of the save in flight.

    Attributes:
        began: `time.perf_counter()` when `save` was called.
        numbers: fields of the event, as they become known.
        error: why it failed; None while it has not.
        is_begun: whether the writer was told of it, so that it will report an outcome.
        num_steps_to_staged: what is missing before nothing can be lost: all bytes handed over, and the writer's lock held.
        held_s: how long the optimizer had to wait for the copy.
        frozen_digest: of the frozen parameters in this save; "" if there are none.
        has_frozen_image: whether the writer was given an image of them.
        committed_s: from the call until the outcome was known; None while it is not.
        num_reports: how many of the two things have happened that have to precede the event.
        is_over: set when the outcome is known and reported.
    """

    pending: PendingCheckpoint
    attempt: str
    began: float
    numbers: dict[str, Any] = field(default_factory=dict)
    written: Written | None = None
    error: BackstayError | None = None
    is_begun: bool = False
    num_steps_to_staged: int = 2
    held_s: float = 0.0
    frozen_digest: str = ""
    has_frozen_image: bool = False
    committed_s: float | None = None
    num_reports: int = 0
    is_over: threading.Event = field(default_factory=threading.Event)

    @property
    def step(self) -> int:
        """Of the checkpoint."""
        return self.pending.step

    def elapsed_s(self) -> float:
        """Seconds since `save` was called."""
        return time.perf_counter() - self.began

    def event(self) -> SaveEvent:
        """What the save cost and how it ended, when both are known."""
        assert self.committed_s is not None, "an event tells of an outcome"
        numbers = dict(self.numbers)
        numbers["blocked_s"] = numbers.get("blocked_s", 0.0) + self.held_s
        if self.written is not None:
            numbers |= {
                "written_s": self.written.seconds,
                "hash_s": self.written.hash_seconds,
                "cpu_s": self.written.cpu_seconds,
                "gb_per_s": self.written.num_bytes / max(self.written.seconds, 1e-9) / 1e9,
            }
        return SaveEvent(
            step=self.step,
            attempt=self.attempt,
            outcome="committed" if self.error is None else "failed",
            committed_s=self.committed_s,
            **numbers,
        )


def as_error(step: int, failed: Failed) -> BackstayError:
    """The exception for a failure that a writer reports."""
    cls = getattr(errors, failed.kind, SaveFailed)
    if not (isinstance(cls, type) and issubclass(cls, BackstayError)):
        cls = SaveFailed
    kind = "" if cls.__name__ == failed.kind and cls is not SaveFailed else f" [{failed.kind}]"
    return cls(
        f"step {step} was not committed: rank {failed.rank}: {failed.cause}{kind}. "
        "Earlier checkpoints are untouched, and the next save may work"
    )
