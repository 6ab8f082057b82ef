"""One event per save: what it cost and how it ended, for a callback, for `<root>/events.jsonl`, and for a table. No torch.

Runs in: the trainer; the writer appends the same fields when its trainer is gone.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EVENTS_NAME = "events.jsonl"


@dataclass(frozen=True, kw_only=True)
class SaveEvent:
    """What one save cost, and how it ended. Times are seconds of this rank.

    Attributes:
        step: of the checkpoint.
        attempt: names the save.
        outcome: "committed" or "failed".
        drained_s: how long `save` waited for the save before it.
        blocked_s: how long training stood still for this save: the call, without `drained_s`, and the optimizer's wait.
        staged_s: from the call, after `drained_s`, until all values were copied.
        written_s: what writing this rank's files took.
        committed_s: likewise until the checkpoint was published, or had failed.
        num_bytes: of the whole checkpoint on rank 0; of this rank's files elsewhere.
        gb_per_s: `num_bytes` of this rank's files over `written_s`.
        hash_s, cpu_s: processor time of the writer for hashing, and in all.
        is_planned: whether this save had to make a plan.
        unchanged: all trained values are those of the checkpoint before.
        kind, rank, cause: of a failure.
        trainer_gone: the writer finished alone.
    """

    step: int
    attempt: str
    outcome: str
    drained_s: float = 0.0
    blocked_s: float = 0.0
    staged_s: float = 0.0
    written_s: float = 0.0
    committed_s: float = 0.0
    num_bytes: int = 0
    gb_per_s: float = 0.0
    hash_s: float = 0.0
    cpu_s: float = 0.0
    is_planned: bool = False
    unchanged: bool = False
    kind: str = ""
    rank: int = -1
    cause: str = ""
    trainer_gone: bool = False


def append_event(root: Path, event: SaveEvent) -> None:
    """Add an event to the log below the root.

    Raises:
        OSError: it cannot be written.
    """
    append_fields(root, asdict(event))


def append_fields(root: Path, fields: Mapping[str, object]) -> None:
    """Add some fields of an event to the log, as one line.

    Raises:
        OSError: it cannot be written.
    """
    append_line(root / EVENTS_NAME, fields)


def append_line(path: Path, fields: Mapping[str, object]) -> None:
    """Add a line to a JSONL file; a line that a crash cut short stays apart from it.

    Raises:
        OSError: it cannot be written.
    """
    data = (json.dumps(fields) + "\n").encode()
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666)
    try:
        end = os.fstat(fd).st_size
        if end and os.pread(fd, 1, end - 1) != b"\n":
            data = b"\n" + data
        os.write(fd, data)
    finally:
        os.close(fd)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a line cut short by a crash is passed over, and a file that is not there is empty."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if isinstance(fields, dict):
            found.append(fields)
    return found


def read_events(root: Path) -> list[SaveEvent]:
    """All events of a root's log; a line cut short by a crash is passed over."""
    known = SaveEvent.__dataclass_fields__.keys()
    found = []
    for fields in read_lines(root / EVENTS_NAME):
        with suppress(TypeError):
            found.append(SaveEvent(**{name: fields[name] for name in known & fields.keys()}))
    return found


def table(events: Sequence[SaveEvent]) -> str:
    """The events as a table, with the training time lost in all."""
    head = f"{'step':>10} {'outcome':>9} {'blocked':>10} {'staged':>10} {'written':>10} {'durable':>10} {'GB':>8} {'GB/s':>6}"
    lines = [head, *map(_row, events)]
    lost = sum(event.blocked_s + event.drained_s for event in events)
    lines.append(f"{len(events)} saves; training time lost to them: {lost:.3f} s{_remarks(events)}")
    return "\n".join(lines)


def _row(event: SaveEvent) -> str:
    times = (event.blocked_s, event.staged_s, event.written_s, event.committed_s)
    cells = " ".join(f"{seconds * 1e3:>7.1f} ms" for seconds in times)
    size = f"{event.num_bytes / 1e9:>8.3f} {event.gb_per_s:>6.2f}"
    return f"{event.step:>10} {event.outcome:>9} {cells} {size}"


def _remarks(events: Iterable[SaveEvent]) -> str:
    waited = sum(event.drained_s for event in events)
    return f", {waited:.3f} s of it waiting for the save before" if waited > 0.001 else ""
