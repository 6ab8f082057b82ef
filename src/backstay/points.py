"""Named points of a save and a load, at which a test may kill, fail, delay or hold the process.

In production `reach` looks into an empty dict. `backstay.testing.faults` installs actions; a trainer hands its installed
actions to the writer it starts, so one specification covers both sides of the process border. No torch here.
"""

import errno
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TRAINER_POINTS = (
    "save.begin",
    "save.agree",
    "save.stage_early",
    "save.stage",
    "save.submit",
    "load.read",
)
WRITER_POINTS = (
    "writer.received",
    "write.create",
    "write.first_chunk",
    "write.last_chunk",
    "write.fsync",
    "write.done_record",
    "commit.metadata",
    "commit.manifest",
    "commit.rename",
    "commit.fsync_parent",
    "prune.manifest",
    "prune.file",
    "prune.last",
)
ALL_POINTS = TRAINER_POINTS + WRITER_POINTS


@dataclass(frozen=True, kw_only=True)
class Action:
    """What happens when a point is reached.

    Attributes:
        point: one of `ALL_POINTS`.
        kind: "kill" (SIGKILL to this process), "raise" (OSError with `errno_name`), "sleep" (`seconds`), "hold"
            (create `path` + ".reached", then wait until `path` exists; the limit is `seconds`).
        rank: only on this rank; None means on all.
        nth: act from the n-th time the point is reached in this process (1 = first).
        times: how often to act; 0 means always from `nth` on.
    """

    point: str
    kind: str
    rank: int | None = None
    nth: int = 1
    times: int = 1
    errno_name: str = "EIO"
    seconds: float = 60.0
    path: str = ""


_actions: list[Action] = []
_reached: dict[str, int] = {}
_rank = 0


def install(actions: list[Action], *, rank: int) -> None:
    """Replace the installed actions; `rank` is this process's rank."""
    global _rank
    unknown = [action.point for action in actions if action.point not in ALL_POINTS]
    if unknown:
        raise ValueError(f"unknown points {unknown}; expected some of {ALL_POINTS}")
    _actions[:] = actions
    _reached.clear()
    _rank = rank


def dump() -> str:
    """The installed actions as JSON, for a writer's command line."""
    return json.dumps([asdict(action) for action in _actions])


def parse(text: str) -> list[Action]:
    """The inverse of `dump`."""
    return [Action(**fields) for fields in json.loads(text)]


def reach(point: str) -> None:
    """Mark that this process is at `point`, and do what is installed there."""
    if not _actions:
        return
    _reached[point] = _reached.get(point, 0) + 1
    for action in _actions:
        if action.point == point and action.rank in (None, _rank) and _is_due(action):
            _act(action)


def _is_due(action: Action) -> bool:
    num_past = _reached[action.point] - action.nth
    return num_past >= 0 and (action.times == 0 or num_past < action.times)


def _act(action: Action) -> None:
    if action.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action.kind == "raise":
        code = getattr(errno, action.errno_name)
        raise OSError(code, f"{os.strerror(code)} (injected at {action.point})")
    elif action.kind == "sleep":
        time.sleep(action.seconds)
    elif action.kind == "hold":
        _hold(action)
    else:
        raise ValueError(f"unknown action {action.kind!r} at {action.point}")


def _hold(action: Action) -> None:
    Path(action.path + ".reached").touch()
    deadline = time.monotonic() + action.seconds
    while not os.path.exists(action.path):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"held at {action.point} for {action.seconds} s; {action.path} never came"
            )
        time.sleep(0.002)
