"""Extents become few, large ranges, each of them within the limits."""

from backstay.load.coalesce import MAX_EXTENTS, Extent, coalesce


def extent(begin: int, end: int, sink: str = "") -> Extent[str]:
    return Extent(begin, end, (sink,))


def places(ranges: list) -> list[list[tuple[int, int]]]:
    return [[(each.begin, each.end) for each in row.extents] for row in ranges]


def test_adjacent_extents_share_a_range_and_small_gaps_are_read_over() -> None:
    ranges = coalesce("f", [extent(30, 40), extent(0, 10), extent(10, 20)], max_bytes=100)
    assert places(ranges) == [[(0, 10), (10, 20), (30, 40)]]
    assert (ranges[0].path, ranges[0].begin, ranges[0].end) == ("f", 0, 40)


def test_a_large_gap_begins_a_new_range() -> None:
    ranges = coalesce("f", [extent(0, 10), extent(31, 40)], max_bytes=100, max_gap=20)
    assert places(ranges) == [[(0, 10)], [(31, 40)]]


def test_extents_of_the_same_bytes_are_read_once() -> None:
    (row,) = coalesce("f", [extent(0, 9, "a"), extent(0, 9, "b")], max_bytes=100)
    assert row.extents == (Extent(0, 9, ("a", "b")),)


def test_extents_that_overlap_go_to_ranges_of_their_own() -> None:
    wanted = [extent(0, 9), extent(5, 12), extent(6, 7), extent(9, 20)]
    ranges = coalesce("f", wanted, max_bytes=100)
    assert sorted(places(ranges)) == [[(0, 9), (9, 20)], [(5, 12)], [(6, 7)]]


def test_empty_extents_are_not_read() -> None:
    assert coalesce("f", [extent(3, 3)], max_bytes=100) == []


def test_ranges_stay_within_their_limits() -> None:
    wanted = [extent(at, at + 50) for at in range(0, 1000, 50)]
    ranges = coalesce("f", wanted, max_bytes=100)
    assert all(row.end - row.begin <= 100 for row in ranges)
    many = [extent(at, at + 1) for at in range(2000)]
    assert all(len(row.extents) <= MAX_EXTENTS for row in coalesce("f", many, max_bytes=1 << 20))
