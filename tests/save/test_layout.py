"""Where frames lie in a rank's files: a file put together by hand from a layout is one that torch reads."""

import io
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from backstay.frames import object_frame
from backstay.save.layout import (
    ALIGNMENT,
    FROZEN,
    TRAINED,
    Layout,
    Piece,
    file_name,
    make_layout,
    slot_bytes,
)

VALUES = {
    "weight": torch.arange(15.0).view(3, 5),
    "base": torch.arange(7).to(torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "lr": 0.1,
    "mask": torch.tensor([True, False, True]),
    "wave": torch.arange(3) * (1 + 2j),
    "tiny": torch.arange(9.0).to(torch.float8_e4m3fn),
    "betas": (0.9, 0.95),
    "base2": torch.ones(1025, dtype=torch.int8),
    "last": torch.arange(3),
}
FROZEN_NAMES = frozenset({"base", "base2"})


def write_items(values: dict[str, object]) -> list[WriteItem]:
    return [item for name, value in values.items() for item in _create_write_items(name, value)]


def slots_of(values: dict[str, object]) -> dict[str, int]:
    frames = {n: object_frame(v) for n, v in values.items() if not isinstance(v, Tensor)}
    return {name: slot_bytes(len(frame)) for name, frame in frames.items()}


def lay_out(values: dict[str, object] | None = None) -> Layout:
    values = VALUES if values is None else values
    return make_layout(write_items(values), frozen=FROZEN_NAMES, slots=slots_of(values))


def by_name(layout: Layout) -> dict[str, Piece]:
    return {piece.name: piece for piece in layout.pieces}


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assemble(layout: Layout, values: dict[str, object]) -> list[bytes]:
    """The files as a save would make them."""
    files = [bytearray(size) for size in layout.file_bytes]
    for piece in layout.pieces:
        value = values[piece.name]
        if isinstance(value, Tensor):
            parts = {
                piece.offset: piece.frame.head,
                piece.data_offset: raw_bytes(value),
                piece.data_offset + value.nbytes: piece.frame.tail,
            }
        else:
            parts = {piece.offset: object_frame(value)}
        for offset, data in parts.items():
            files[piece.file][offset : offset + len(data)] = data
    return [bytes(file) for file in files]


def test_every_write_item_has_a_piece_in_the_order_of_the_items() -> None:
    assert [piece.name for piece in lay_out().pieces] == [*VALUES]


def test_frames_and_raw_bytes_begin_at_multiples_of_64() -> None:
    for piece in lay_out().pieces:
        assert piece.offset % ALIGNMENT == 0
        if piece.dtype is not None:
            assert piece.data_offset % ALIGNMENT == 0


@pytest.mark.parametrize("file", [TRAINED, FROZEN])
def test_slices_do_not_overlap_and_fill_their_file(file: int) -> None:
    layout = lay_out()
    pieces = [piece for piece in layout.pieces if piece.file == file]
    ends = [piece.offset + piece.num_bytes for piece in pieces]
    assert pieces[0].offset == 0
    for end, following in zip(ends, pieces[1:], strict=False):
        assert end <= following.offset < end + ALIGNMENT
    assert ends[-1] == layout.file_bytes[file]
    assert all(first.offset < second.offset for first, second in pairwise(pieces))


def test_frozen_names_and_no_others_go_to_the_second_file() -> None:
    files = {name: piece.file for name, piece in by_name(lay_out()).items()}
    assert {name for name, file in files.items() if file == FROZEN} == FROZEN_NAMES


def test_a_file_that_nothing_goes_to_has_no_bytes() -> None:
    trained = lay_out({"weight": VALUES["weight"]})
    assert trained.file_bytes[FROZEN] == 0
    assert trained.num_bytes == trained.file_bytes[TRAINED] > 0
    assert lay_out({"base": VALUES["base"]}).file_bytes[TRAINED] == 0
    assert lay_out({}).file_bytes == (0, 0)


def test_the_size_of_a_layout_is_that_of_both_files() -> None:
    layout = lay_out()
    assert layout.num_bytes == layout.file_bytes[0] + layout.file_bytes[1]


def test_slots_reserve_exactly_what_is_asked() -> None:
    items = write_items({"lr": 0.1, "weight": torch.ones(2), "betas": (0.9,)})
    layout = make_layout(items, frozen=frozenset(), slots={"lr": 1000, "betas": 64})
    lr, weight, betas = layout.pieces
    assert (lr.num_bytes, lr.dtype) == (1000, None)
    assert weight.offset == 1024
    assert betas.num_bytes == 64


def test_a_tensor_with_a_slot_is_stored_with_its_whole_frame() -> None:
    layout = make_layout(
        write_items({"odd": torch.ones(2)}), frozen=frozenset({"odd"}), slots={"odd": 4096}
    )
    assert layout.pieces == (Piece("odd", FROZEN, 0, 4096),)


def test_a_slot_has_room_to_grow_and_keeps_the_alignment() -> None:
    for size in (0, 1, 63, 64, 1000):
        assert slot_bytes(size) >= size + 512
        assert slot_bytes(size) % ALIGNMENT == 0


def test_the_same_items_give_the_same_layout() -> None:
    assert lay_out() == lay_out()


def test_values_do_not_matter_only_their_form_does() -> None:
    others = {n: torch.zeros_like(v) if isinstance(v, Tensor) else v for n, v in VALUES.items()}
    assert lay_out(others) == lay_out()


def test_a_file_put_together_from_a_layout_loads_slice_by_slice() -> None:
    layout = lay_out()
    files = assemble(layout, VALUES)
    for piece in layout.pieces:
        piece_bytes = files[piece.file][piece.offset : piece.offset + piece.num_bytes]
        found = torch.load(io.BytesIO(piece_bytes), weights_only=True)
        expected = VALUES[piece.name]
        if isinstance(expected, Tensor):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert raw_bytes(found) == raw_bytes(expected)
        else:
            assert found == expected


def test_files_are_called_as_dcp_calls_them() -> None:
    assert file_name(3, TRAINED) == "__3_0.distcp"
    assert file_name(12, FROZEN) == "__12_1.distcp"
