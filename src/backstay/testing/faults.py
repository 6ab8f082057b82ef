"""Failures on purpose: kill, fail, slow down or hold a process at one of the named points of a save or a load.

Guarantees: actions that `inject` installed are gone when its block is left. Those that a trainer handed to its writer at the
writer's start stay with that writer.
Assumes: `inject` is entered before the `Checkpointer` is made, if writers are meant, and by one thread at a time.

The points are in `backstay.points.ALL_POINTS`; those that begin with `writer.`, `write.`, `commit.` and `prune.` are reached in
the writer process, all others in the trainer.
"""

import errno
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from backstay import points
from backstay.errors import InvalidArgument
from backstay.points import Action


@contextmanager
def inject(*actions: Action) -> Iterator[None]:
    """Install actions in this process, beside those of an enclosing `inject`, until the block is left.

    Counts of `nth` begin anew, for all actions, when the block is entered and when it is left.
    """
    outer = points.parse(points.dump())
    points.install([*outer, *actions], rank=_rank())
    try:
        yield
    finally:
        points.install(outer, rank=_rank())


def kill_at(point: str, rank: int | None = None, *, nth: int = 1) -> Action:
    """SIGKILL the process that reaches `point` for the `nth` time; `rank=None` means on every rank."""
    return Action(point=point, kind="kill", rank=rank, nth=nth)


def fail_at(
    point: str, errno_name: str = "EIO", *, rank: int | None = None, nth: int = 1, times: int = 1
) -> Action:
    """Raise OSError with that errno ("ENOSPC", "EIO", "EACCES"), from the `nth` time on and `times` often (0: always)."""
    if not isinstance(getattr(errno, errno_name, None), int):
        raise InvalidArgument(f"expected the name of an errno such as 'ENOSPC', got {errno_name!r}")
    return Action(point=point, kind="raise", rank=rank, nth=nth, times=times, errno_name=errno_name)


def slow_at(
    point: str, seconds: float, *, rank: int | None = None, nth: int = 1, times: int = 0
) -> Action:
    """Sleep `seconds` at `point`, from the `nth` time on and `times` often (0: always)."""
    return Action(point=point, kind="sleep", rank=rank, nth=nth, times=times, seconds=seconds)


@dataclass(frozen=True)
class Gate:
    """Holds a process at a point until it is told to go on, so that a test can put things in an order without sleeping.

    It works across processes and can be passed to ranks. Leaving it as a context manager opens it, so that a failing test
    leaves nobody waiting. One gate serves one pass: open stays open.

    Attributes:
        path: a name in an existing directory, for the two files of the gate.
        limit_s: after which whoever waits at the gate raises TimeoutError.
    """

    path: Path
    point: str
    rank: int | None = None
    nth: int = 1
    limit_s: float = 60.0

    @property
    def action(self) -> Action:
        """What to `inject`."""
        return Action(
            point=self.point,
            kind="hold",
            rank=self.rank,
            nth=self.nth,
            seconds=self.limit_s,
            path=str(self.path),
        )

    @property
    def is_reached(self) -> bool:
        return Path(f"{self.path}.reached").exists()

    def wait_reached(self, timeout_s: float = 30.0) -> None:
        """Return once some process is held.

        Raises:
            TimeoutError: nobody came.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_reached:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody reached {self.point} within {timeout_s:g} s")
            time.sleep(0.002)

    def open(self) -> None:
        """Let whoever is held, and all who come later, go on."""
        self.path.touch()

    def __enter__(self) -> "Gate":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.open()


def _rank() -> int:
    """This process's rank, without importing torch where nobody did."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return 0
