"""Exporter: exports during training, from the files of committed checkpoints, in a process that gives way to the trainer.

Runs in: rank 0's trainer. `start` is called wherever a save is reported, `wait` in the training thread; a daemon thread of this module starts
one process after the other. Guarantees: nothing is copied from the device again; a pruned checkpoint is still exported; each failure
is logged once and raised once; what killed exports left is removed before the next one. Assumes: a checkpoint is not pruned before the
event of its commit has been delivered, which the saver guarantees: no save begins earlier.

All exports stay, however many checkpoints retention keeps; a queue of exports keeps the files of its checkpoints on disk.
"""

import logging
import os
import subprocess
import threading
import time
from collections import deque

from backstay.errors import BackstayError, ExportFailed
from backstay.interop.hf_child import start_child, wait_for_child
from backstay.interop.hf_draft import sweep
from backstay.interop.hf_options import ExportOptions
from backstay.interop.hf_source import Source
from backstay.interop.hf_writing import absolute

log = logging.getLogger("backstay")
# Six hours: at low priority beside a training, and a large model.
LIMIT_S = 21600.0
MANY_WAITING = 3


class Exporter:
    """Exports checkpoints, one at a time and in order.

    Args:
        out_root: an export is `<out_root>/step-00000100`; made at the first one.
        companions: what `save_companions` wrote.
        options: see `ExportOptions`.
        timeout_s: limit for one export.
    """

    def __init__(
        self,
        out_root: str | os.PathLike[str],
        *,
        companions: str | os.PathLike[str],
        options: ExportOptions = ExportOptions(),  # noqa: B008  (frozen)
        timeout_s: float = LIMIT_S,
    ) -> None:
        self.out_root = absolute(out_root)
        self.companions = absolute(companions)
        self.options = options
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queue: deque[Source] = deque()
        self._running: tuple[int, subprocess.Popen[bytes] | None] | None = None
        self._failures: list[str] = []
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Process id of the export that runs now, -1 if none does."""
        running = self._running
        return -1 if running is None or running[1] is None else running[1].pid

    @property
    def is_idle(self) -> bool:
        """Whether all exports that were started have ended."""
        return self._thread is None

    def start(self, checkpoint: str | os.PathLike[str], step: int) -> None:
        """Export a checkpoint that was just committed; returns when its files are linked, within milliseconds, and never raises.

        Call it in `Checkpointer(on_event=...)`, on rank 0. What goes wrong is logged, and raised by `wait`.
        """
        try:
            source = Source(self.out_root, absolute(checkpoint), step)
        except (BackstayError, OSError) as error:
            self._fail(step, f"{type(error).__name__}: {error}")
            return
        with self._changed:
            self._queue.append(source)
            if len(self._queue) >= MANY_WAITING:
                log.warning(
                    "%d exports wait for the one before, and keep their checkpoints' files on disk: export less often",
                    len(self._queue),
                )
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="backstay-export", daemon=True
                )
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for all exports that were started.

        Raises:
            ExportFailed: some failed since the last call, or are not done after `timeout_s` seconds; those go on.
        """
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._thread is None, timeout_s)
            failures, self._failures = self._failures, []
            if not is_done:
                left = [source.step for source in self._queue]
                steps = [*([self._running[0]] if self._running else []), *left]
                names = ", ".join(map(str, steps))
                failures.append(f"step {names}: not exported after {timeout_s:g} s; it goes on")
        if failures:
            raise ExportFailed("\n".join(failures))

    def _work(self) -> None:
        """Export until the queue is empty."""
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                source = self._queue.popleft()
                self._running = (source.step, None)
            try:
                cause = self._export(source)
            except (BackstayError, OSError) as error:
                cause = f"{type(error).__name__}: {error}"
            finally:
                source.discard()
                self._running = None
            if cause is not None:
                self._fail(source.step, cause)

    def _export(self, source: Source) -> str | None:
        began = time.monotonic()
        sweep(self.out_root)
        process = start_child(source, companions=self.companions, options=self.options)
        self._running = (source.step, process)
        cause = wait_for_child(process, source, timeout_s=self.timeout_s)
        if cause is None:
            seconds = time.monotonic() - began
            log.info("exported step %d to %s in %.1f s", source.step, source.out, seconds)
        return cause

    def _fail(self, step: int, cause: str) -> None:
        message = f"the export of step {step} failed: {cause}"
        log.error("%s", message)
        with self._changed:
            self._failures.append(message)
