"""Windows become extents that hold all that is wanted and little else."""

import itertools

import pytest
import torch

from backstay.frame_head import FrameHead
from backstay.load.plan import (
    FillSink,
    TensorRead,
    Window,
    WindowSink,
    byte_window,
    group,
    is_dense,
    predict,
    split_window,
    window_extents,
)


def head_of(*shape: int, dtype: torch.dtype = torch.int16) -> FrameHead:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return FrameHead(704, tensor.nbytes, dtype, shape, tensor.stride(), 0)


def read_of(target: torch.Tensor, *starts: int, shape: tuple[int, ...]) -> TensorRead:
    return TensorRead(
        key="w",
        path="f",
        offset=1000,
        length=1 << 40,
        dtype=torch.int16,
        chunk_shape=shape,
        starts=starts,
        lengths=tuple(target.shape),
        target=target,
    )


def test_a_window_is_enclosed_by_its_first_and_last_element() -> None:
    head = head_of(6, 10)
    assert byte_window(head, Window((0, 0), (6, 10))) == (704, 704 + 120)
    assert byte_window(head, Window((2, 3), (2, 4))) == (704 + 46, 704 + 46 + 28)
    assert byte_window(head, Window((2, 3), (0, 4))) == (704 + 46, 704 + 46)
    assert byte_window(head_of(), Window((), ())) == (704, 706)


@pytest.mark.parametrize(
    ("starts", "lengths", "expected"),
    [
        ((0, 0, 0), (4, 5, 6), True),
        ((1, 0, 0), (2, 5, 6), True),
        ((3, 1, 0), (1, 2, 6), True),
        ((3, 1, 2), (1, 1, 3), True),
        ((0, 1, 0), (2, 2, 6), False),
        ((0, 0, 1), (4, 5, 5), False),
    ],
)
def test_only_rows_of_the_leading_dimension_are_dense(
    starts: tuple[int, ...], lengths: tuple[int, ...], expected: bool
) -> None:
    assert is_dense(Window(starts, lengths), head_of(4, 5, 6).stride) is expected


@pytest.mark.parametrize("max_bytes", [1, 2, 7, 30, 64, 1000])
def test_parts_of_a_window_cover_each_element_once(max_bytes: int) -> None:
    head, window = head_of(5, 7, 4), Window((1, 2, 1), (4, 5, 2))
    parts = list(split_window(head, window, max_bytes))
    seen: list[tuple[int, ...]] = []
    for part in parts:
        begin, end = byte_window(head, part)
        assert end - begin <= max(max_bytes, 2)
        rows = [range(a, a + n) for a, n in zip(part.starts, part.lengths, strict=True)]
        seen += itertools.product(*rows)
    assert sorted(seen) == list(itertools.product(range(1, 5), range(2, 7), range(1, 3)))


def test_rows_far_apart_are_read_one_by_one() -> None:
    head = head_of(3, 1 << 20)
    assert len(list(split_window(head, Window((0, 0), (3, 8)), 1 << 30))) == 3
    assert len(list(split_window(head, Window((0, 0), (3, 1 << 20)), 1 << 30))) == 1


def test_a_dense_window_fills_the_target_in_pieces() -> None:
    target = torch.zeros(4, 10, dtype=torch.int16)
    read = read_of(target, 1, 0, shape=(6, 10))
    found = list(window_extents(head_of(6, 10), read, 32))
    assert places_of(found) == [(1724, 1756), (1756, 1788), (1788, 1804)]
    for each in found:
        (sink,) = each.sinks
        assert isinstance(sink, FillSink)
        sink.memory[:] = 1
    assert (target == 0x0101).all()


def places_of(extents: list) -> list[tuple[int, int]]:
    return [(each.begin, each.end) for each in extents]


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(6, 4, dtype=torch.int16),
        torch.zeros(10, 6, dtype=torch.int16).T,
        torch.zeros(6, 10, dtype=torch.int32),
        torch.zeros(6, 10, dtype=torch.int16, device="meta"),
    ],
    ids=["inner", "transposed", "dtype", "device"],
)
def test_other_windows_are_copied(target: torch.Tensor) -> None:
    found = list(window_extents(head_of(6, 10), read_of(target, 0, 0, shape=(6, 10)), 1 << 20))
    assert [type(sink) for each in found for sink in each.sinks] == [WindowSink]


def test_a_chunk_too_large_for_its_slice_is_not_predicted() -> None:
    read = read_of(torch.zeros(1, dtype=torch.int16), 0, shape=(1 << 50,))
    (chunk,) = group([read])
    assert predict(chunk) is None


def test_a_contiguous_tensor_is_predicted() -> None:
    (chunk,) = group([read_of(torch.zeros(1, 2, dtype=torch.int16), 0, 0, shape=(6, 10))])
    assert predict(chunk) == head_of(6, 10)
