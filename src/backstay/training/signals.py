"""StopSignals: SIGTERM and SIGUSR1 as wishes that all ranks learn of together, at points where it is safe to save.

Runs in: handlers in the main thread, which only count; `agree` in the training thread of all ranks. Guarantees: no rank acts on a signal alone, so none leaves
the others waiting; a second signal changes nothing.
"""

import ctypes
import os
import signal
from dataclasses import dataclass
from types import FrameType, TracebackType

from backstay.coordination import Coordination

# What a shell reports for a process ended by SIGTERM; here: saved, and ended by request, so that running the same command again goes on.
STOPPED = 128 + signal.SIGTERM
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Wish:
    """What signals ask for: `save` and go on, or save and `stop`."""

    save: bool = False
    stop: bool = False


class StopSignals:
    """Listens while its `with` block runs; the handlers that were there come back afterwards."""

    def __init__(self) -> None:
        self._counts = {signal.SIGUSR1: 0, signal.SIGTERM: 0}
        self._before: dict[int, object] = {}

    def agree(self, ranks: Coordination) -> Wish:
        """What any rank was asked for since the last call; one small reduction, so all ranks call it at the same points."""
        saves, stops = self._counts[signal.SIGUSR1], self._counts[signal.SIGTERM]
        save, stop = ranks.agree([saves, stops])
        # Not to zero: another one may have come just now.
        self._counts[signal.SIGUSR1] -= saves
        return Wish(save=save.high > 0, stop=stop.high > 0)

    def __enter__(self) -> "StopSignals":
        for number in self._counts:
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _count(self, number: int, _: FrameType | None) -> None:
        self._counts[signal.Signals(number)] += 1


def follow_launcher() -> None:
    """Have the kernel send this process SIGTERM when its launcher dies; else it would train on, unseen, beside its successor."""
    launcher = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)
