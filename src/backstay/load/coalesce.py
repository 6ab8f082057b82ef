"""Put what is wanted of a file into few, large ranges. Pure.

An extent is a run of bytes in a file with the places that it goes to; a range is a row of extents that are read at once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

# Of vectors that one `preadv` takes, as Linux has it; every extent may need one more for a gap.
MAX_EXTENTS = 1024 // 2
# Bytes that are read only to be dropped, because that costs less than another call.
MAX_GAP_BYTES = 64 << 10
Sink = TypeVar("Sink")


@dataclass(frozen=True, slots=True)
class Extent(Generic[Sink]):
    """The bytes from `begin` to before `end` of a file, and all that they are for."""

    begin: int
    end: int
    sinks: tuple[Sink, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Range(Generic[Sink]):
    """Extents of one file, in order and apart from one another, to be read at once."""

    path: str
    extents: tuple[Extent[Sink], ...]

    @property
    def begin(self) -> int:
        """Its first byte."""
        return self.extents[0].begin

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.extents[-1].end


def coalesce(
    path: str, extents: Iterable[Extent[Sink]], *, max_bytes: int, max_gap: int = MAX_GAP_BYTES
) -> list[Range[Sink]]:
    """Put the extents of one file into the fewest ranges, in the file's order.

    Args:
        path: the file's.
        extents: in any order. Those of the same bytes become one; those that overlap go to ranges of
            their own; empty ones are dropped.
        max_bytes: a range takes no more extents once it spans half of this; so if no extent is larger
            than half, no range is larger than the whole.
        max_gap: unwanted bytes between two extents that a range may include.
    """
    waiting = _merge_equal(extents)
    ranges: list[Range[Sink]] = []
    while waiting:
        row: list[Extent[Sink]] = []
        overlapping: list[Extent[Sink]] = []
        for extent in waiting:
            if row and extent.begin < row[-1].end:
                overlapping.append(extent)
                continue
            if row and not _joins(row, extent, max_bytes, max_gap):
                ranges.append(Range(path, tuple(row)))
                row = []
            row.append(extent)
        ranges.append(Range(path, tuple(row)))
        waiting = overlapping
    return sorted(ranges, key=lambda each: each.begin)


def _merge_equal(extents: Iterable[Extent[Sink]]) -> list[Extent[Sink]]:
    found: dict[tuple[int, int], Extent[Sink]] = {}
    for extent in extents:
        if extent.num_bytes:
            place = (extent.begin, extent.end)
            other = found.setdefault(place, extent)
            if other is not extent:
                found[place] = Extent(*place, other.sinks + extent.sinks)
    return sorted(found.values(), key=attrgetter("begin", "end"))


def _joins(row: Sequence[Extent[Sink]], extent: Extent[Sink], max_bytes: int, max_gap: int) -> bool:
    return (
        extent.begin - row[-1].end <= max_gap
        and 2 * (row[-1].end - row[0].begin) < max_bytes
        and len(row) < MAX_EXTENTS
    )
