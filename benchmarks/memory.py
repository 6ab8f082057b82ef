"""What processes hold: proportional and resident sizes of a tree of processes, sampled over time."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """What processes held at one time: PSS of all, RSS of the largest process that a rank started."""

    at: float
    pss_bytes: int
    helper_rss_bytes: int


class MemoryWatch:
    """Samples the memory of ranks and all that they start, from a thread of the process that started the ranks.

    Args:
        folder: where each rank writes a file that has its process id for a name.
    """

    def __init__(self, folder: Path, *, every_s: float = 0.05) -> None:
        self.samples: list[Sample] = []
        self._folder, self._every_s = folder, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        folder.mkdir()

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def before(self, moment: float) -> int:
        """PSS at the last sample before a moment of the monotonic clock."""
        return [each.pss_bytes for each in self.samples if each.at <= moment][-1]

    def peak(self, since: float) -> int:
        """The largest PSS since a moment."""
        return max(each.pss_bytes for each in self.samples if each.at >= since)

    def helper_peak(self, since: float) -> int:
        """The largest RSS of a single helper since a moment."""
        return max(each.helper_rss_bytes for each in self.samples if each.at >= since)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            ranks = {int(path.name) for path in self._folder.iterdir()}
            if ranks:
                at = time.monotonic()
                found = {pid: rollup(pid) for pid in process_tree(ranks)}
                helpers = [rss for pid, (_, rss) in found.items() if pid not in ranks]
                pss = sum(pss for pss, _ in found.values())
                self.samples.append(Sample(at, pss, max(helpers, default=0)))


def process_tree(roots: Iterable[int]) -> set[int]:
    """Process ids of processes and of all their descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting.extend(children.get(pid, []))
    return found


def rollup(pid: int) -> tuple[int, int]:
    """PSS and RSS of a process in bytes; nothing of one that is gone."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
    return fields.get("Pss", 0), fields.get("Rss", 0)


def trim_memory() -> None:
    """Give freed memory back, so that what is allocated next shows as growth."""
    ctypes.CDLL(None).malloc_trim(0)
