"""What stock DCP wrote comes back bit for bit, whatever window of it is wanted and however it is read."""

import io
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.serialization import config as serialization_config

from backstay import points
from backstay.errors import CorruptCheckpoint
from backstay.frame_head import parse_head
from backstay.frames import object_frame
from backstay.load.metadata import read_metadata
from backstay.load.reader import TensorRead, read_slices, read_tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own words on single-process saves

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
]
STATE = {
    **{f"dtype.{dtype}": (torch.rand(33, 7) * 9).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "row": torch.rand(1000),
    "matrix": torch.rand(200, 300),
    "cube": torch.rand(40, 50, 60, dtype=torch.float64),
    "transposed": torch.rand(30, 20).T,
    "parameter": torch.nn.Parameter(torch.rand(9)),
}
FILE = "data.bin"


class Tagged(torch.Tensor):
    """A subclass whose frame is not that of a plain tensor."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "c"
    dcp.save(dict(STATE), storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
    return directory


def read_of(
    checkpoint: Path, key: str, target: torch.Tensor, starts: tuple[int, ...] = ()
) -> TensorRead:
    metadata = read_metadata(checkpoint)
    entry = metadata.state_dict_metadata[key]
    (info,) = (each for index, each in metadata.storage_data.items() if index.fqn == key)
    return TensorRead(
        key=key,
        path=info.relative_path,
        offset=info.offset,
        length=info.length,
        dtype=entry.properties.dtype,
        chunk_shape=tuple(entry.size),
        starts=starts or (0,) * target.dim(),
        lengths=tuple(target.shape),
        target=target,
    )


def read_of_frame(directory: Path, frame: bytes, stored: torch.Tensor) -> TensorRead:
    """A read of the whole of one frame, which becomes a file in front of other bytes."""
    (directory / FILE).write_bytes(b"x" * 100 + frame + b"y" * 5000)
    return TensorRead(
        key="w",
        path=FILE,
        offset=100,
        length=len(frame),
        dtype=stored.dtype,
        chunk_shape=tuple(stored.shape),
        starts=(0,) * stored.dim(),
        lengths=tuple(stored.shape),
        target=torch.zeros(stored.shape, dtype=stored.dtype),
    )


def frame_of(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    found, expected = (each.detach().contiguous().reshape(-1) for each in (found, expected))
    return found.dtype == expected.dtype and torch.equal(
        found.view(torch.uint8), expected.view(torch.uint8)
    )


@pytest.mark.parametrize("direct", [True, False, None])
@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 12])
def test_a_stock_checkpoint_comes_back_bit_for_bit(
    checkpoint: Path, direct: bool | None, budget_bytes: int
) -> None:
    targets = {key: torch.zeros_like(value) for key, value in STATE.items()}
    reads = [read_of(checkpoint, key, target) for key, target in targets.items()]
    stats = read_tensors(checkpoint, reads, direct=direct, budget_bytes=budget_bytes)
    assert all(is_same(targets[key], value) for key, value in STATE.items())
    assert stats.num_bytes >= sum(value.nbytes for value in STATE.values())


@pytest.mark.parametrize(
    ("key", "window"),
    [
        ("row", (slice(17, 801),)),
        ("matrix", (slice(5, 120), slice(0, 300))),
        ("matrix", (slice(0, 200), slice(100, 200))),
        ("matrix", (slice(7, 8), slice(9, 10))),
        ("matrix", (slice(7, 7), slice(9, 10))),
        ("cube", (slice(3, 9), slice(0, 50), slice(0, 60))),
        ("cube", (slice(0, 40), slice(11, 30), slice(0, 60))),
        ("cube", (slice(1, 39), slice(2, 48), slice(5, 7))),
        ("transposed", (slice(1, 7), slice(2, 9))),
    ],
)
@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 12])
@pytest.mark.parametrize("direct", [True, False])
def test_a_window_is_what_slicing_gives(
    checkpoint: Path, key: str, window: tuple[slice, ...], budget_bytes: int, direct: bool
) -> None:
    expected = STATE[key][window]
    target = torch.full(expected.shape, 7, dtype=expected.dtype)
    read = read_of(checkpoint, key, target, tuple(each.start for each in window))
    read_tensors(checkpoint, [read], budget_bytes=budget_bytes, direct=direct)
    assert is_same(target, expected)


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(300, 200).T,
        torch.zeros(400, 600)[::2, 1::2],
        torch.zeros(200, 300, dtype=torch.bfloat16),
        torch.zeros(200, 300, dtype=torch.float64),
        torch.nn.Parameter(torch.zeros(200, 300)),
        torch.nn.Parameter(torch.zeros(200, 300, dtype=torch.float64)),
        torch.zeros(200, 300).as_subclass(Tagged),
    ],
    ids=["transposed", "strided", "bfloat16", "float64", "leaf", "converted leaf", "subclass"],
)
def test_any_target_gets_the_values_and_shows_the_change(
    checkpoint: Path, target: torch.Tensor
) -> None:
    before = target._version
    read_tensors(checkpoint, [read_of(checkpoint, "matrix", target)])
    assert torch.equal(target.detach(), STATE["matrix"].to(target.dtype))
    assert target._version > before


def test_several_reads_of_one_slice_all_get_it(checkpoint: Path) -> None:
    reads = [
        read_of(checkpoint, "matrix", torch.zeros(200, 300)),
        read_of(checkpoint, "matrix", torch.zeros(200, 300)),
        read_of(checkpoint, "matrix", torch.zeros(200, 300, dtype=torch.float64)),
        read_of(checkpoint, "matrix", torch.zeros(50, 300), (150, 0)),
    ]
    read_tensors(checkpoint, reads)
    assert all(torch.equal(read.target, STATE["matrix"]) for read in reads[:3])
    assert torch.equal(reads[3].target, STATE["matrix"][150:])


@pytest.mark.parametrize("num_zeros", [0, 1000, 70000])
def test_zeros_behind_a_frame_are_ignored(tmp_path: Path, num_zeros: int) -> None:
    stored = torch.rand(70, 11)
    read = read_of_frame(tmp_path, frame_of(stored) + bytes(num_zeros), stored)
    read_tensors(tmp_path, [read])
    assert torch.equal(read.target, stored)


@pytest.mark.parametrize("storage_alignment", [8, 64, 16384])
def test_a_frame_of_another_alignment_is_found_by_its_head(
    tmp_path: Path, storage_alignment: int
) -> None:
    stored = torch.rand(70, 11)
    with serialization_config.patch({"save.storage_alignment": storage_alignment}):
        frame = frame_of(stored)
    read = read_of_frame(tmp_path, frame, stored)
    read_tensors(tmp_path, [read])
    assert torch.equal(read.target, stored)


def test_one_odd_frame_among_others_is_read_again(tmp_path: Path) -> None:
    stored = [torch.rand(70, 11), torch.rand(70, 20)[:, 3:14], torch.rand(70, 11)]
    offset, reads, content = 0, [], b""
    for tensor in stored:
        frame = frame_of(tensor)
        read = read_of_frame(tmp_path, frame, tensor)
        reads.append(replace(read, offset=offset))
        content += frame
        offset += len(frame)
    (tmp_path / FILE).write_bytes(content)
    read_tensors(tmp_path, reads)
    assert all(torch.equal(each.target, one) for each, one in zip(reads, stored, strict=True))


@pytest.mark.parametrize("num_zeros", [0, 70000])
def test_a_tensor_that_is_no_plain_one_is_unpickled_with_care(
    tmp_path: Path, num_zeros: int
) -> None:
    stored = torch.rand(6, 4).as_subclass(Tagged)
    frame = frame_of(stored) + bytes(num_zeros)
    assert parse_head(frame) is None
    whole = read_of_frame(tmp_path, frame, stored)
    part = replace(whole, starts=(2, 1), lengths=(3, 2), target=torch.zeros(3, 2))
    with torch.serialization.safe_globals([Tagged]):
        read_tensors(tmp_path, [whole, part])
    assert torch.equal(whole.target, stored.as_subclass(torch.Tensor))
    assert torch.equal(part.target, stored.as_subclass(torch.Tensor)[2:5, 1:3])


class Hostile:
    """Creates a directory when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.target),))


def test_a_frame_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    frame = frame_of(Hostile(tmp_path / "made"))
    with pytest.raises(CorruptCheckpoint, match=r"data\.bin: w in the frame at byte 100"):
        read_tensors(tmp_path, [read_of_frame(tmp_path, frame, torch.rand(3))])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("claimed", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)])
def test_a_frame_that_contradicts_the_metadata_is_refused(
    tmp_path: Path, claimed: torch.Tensor
) -> None:
    read = read_of_frame(tmp_path, frame_of(torch.rand(2, 3)), claimed)
    with pytest.raises(CorruptCheckpoint, match=r"expected .* found torch\.float32 of shape"):
        read_tensors(tmp_path, [read])


def test_a_frame_longer_than_its_slice_is_refused(tmp_path: Path) -> None:
    stored = torch.rand(5000)
    read = read_of_frame(tmp_path, frame_of(stored), stored)
    with pytest.raises(CorruptCheckpoint, match="20704 bytes after it begins"):
        read_tensors(tmp_path, [replace(read, length=20100)])


def test_an_empty_slice_is_refused(tmp_path: Path) -> None:
    stored = torch.rand(5)
    read = read_of_frame(tmp_path, frame_of(stored), stored)
    with pytest.raises(CorruptCheckpoint, match=r"data\.bin: w in the frame at byte 100"):
        read_tensors(tmp_path, [replace(read, length=0)])


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    stored = torch.rand(5000)
    read = read_of_frame(tmp_path, frame_of(stored), stored)
    os.truncate(tmp_path / FILE, 20000)
    with pytest.raises(CorruptCheckpoint, match=r"data\.bin is too short: w .* 20000"):
        read_tensors(tmp_path, [read])


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    read = read_of_frame(tmp_path, b"", torch.rand(3))
    with pytest.raises(CorruptCheckpoint, match=r"other\.bin is missing"):
        read_tensors(tmp_path, [replace(read, path="other.bin")])
    with pytest.raises(CorruptCheckpoint, match=r"other\.bin is missing"):
        read_slices(tmp_path, [("other.bin", 0, 1)])


def failing(num_bytes: int) -> None:
    raise RuntimeError("stop here")


def test_the_first_exception_ends_all_threads_and_is_raised(checkpoint: Path) -> None:
    before = threading.active_count()
    reads = [read_of(checkpoint, "cube", torch.zeros(40, 50, 60, dtype=torch.float64))]
    with pytest.raises(RuntimeError, match="stop here"):
        read_tensors(checkpoint, reads, budget_bytes=1 << 15, on_progress=failing)
    assert threading.active_count() == before


def test_progress_adds_up(checkpoint: Path) -> None:
    told: list[int] = []
    read = read_of(checkpoint, "cube", torch.zeros(40, 50, 60, dtype=torch.float64))
    stats = read_tensors(checkpoint, [read], budget_bytes=1 << 15, on_progress=told.append)
    assert len(told) > 10
    assert sum(told) == stats.num_bytes


def test_a_load_passes_its_point_before_it_reads(checkpoint: Path) -> None:
    target = torch.zeros(200, 300)
    points.install([points.Action(point="load.read", kind="raise")], rank=0)
    try:
        with pytest.raises(OSError, match=r"load\.read"):
            read_tensors(checkpoint, [read_of(checkpoint, "matrix", target)])
    finally:
        points.install([], rank=0)
    assert not target.any()


def test_nothing_to_read_is_fine(tmp_path: Path) -> None:
    assert read_tensors(tmp_path, []).num_bytes == 0
    assert read_slices(tmp_path, []) == []


def test_slices_come_back_in_the_order_asked_for(tmp_path: Path) -> None:
    frames = [object_frame({"lr": 0.1}), object_frame(None)]
    (tmp_path / FILE).write_bytes(b"".join(frames))
    first, second = (FILE, 0, len(frames[0])), (FILE, len(frames[0]), len(frames[1]))
    found = read_slices(tmp_path, [second, first, second, (FILE, 3, 0), (FILE, 1, 5)])
    assert found == [frames[1], frames[0], frames[1], b"", frames[0][1:6]]


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    stored = torch.rand(50000)
    read = read_of_frame(tmp_path, frame_of(stored), stored)

    def shrink(num_bytes: int) -> None:
        os.truncate(tmp_path / FILE, 30000)

    with pytest.raises(CorruptCheckpoint, match="became shorter"):
        read_tensors(tmp_path, [read], num_threads=1, budget_bytes=1 << 15, on_progress=shrink)
