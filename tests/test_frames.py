"""Frames made before there are values are, byte for byte, what torch.save writes; heads are read without running."""

import io
import os
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from backstay.frame_head import FrameHead, parse_head
from backstay.frames import object_frame, tensor_frame

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (3, 5, 7), (1025, 1)], ids=str)
def test_a_frame_with_values_is_what_torch_saves(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.rand(shape) * 7).to(dtype)
    frame = tensor_frame(dtype, shape)
    whole = frame.head + raw_bytes(tensor) + frame.tail
    assert whole == object_frame(tensor)
    assert len(whole) == frame.num_bytes
    assert frame.data_offset % 64 == 0
    found = torch.load(io.BytesIO(whole), weights_only=True)
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert raw_bytes(found) == raw_bytes(tensor)


def test_a_frame_of_more_than_4_gib_is_made_without_its_bytes() -> None:
    frame = tensor_frame(torch.bfloat16, (5 << 15, 1 << 14))
    assert frame.data_bytes == 5 << 30
    assert len(frame.head) + len(frame.tail) < 4096


def test_zeros_behind_an_object_frame_do_no_harm() -> None:
    value = {"lr": 0.1, "betas": (0.9, 0.95), "foreach": None}
    frame = object_frame(value) + bytes(1000)
    assert torch.load(io.BytesIO(frame), weights_only=True) == value


def test_checksums_stay_as_the_user_set_them() -> None:
    before = torch.serialization.get_crc32_options()
    tensor_frame(torch.float32, (2, 9))
    assert torch.serialization.get_crc32_options() == before


# Heads ------------------------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass, which torch.save writes by another way."""


def stock_frame(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (3, 5, 7), (70000, 2)], ids=str)
def test_a_head_says_where_the_bytes_are_and_what_they_mean(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = (torch.rand(shape) * 7).to(dtype)
    head = tensor_frame(dtype, shape).head
    expected = FrameHead(len(head), tensor.nbytes, dtype, shape, tensor.stride(), 0)
    assert parse_head(head) == expected
    frame = stock_frame(tensor)  # with checksums
    assert parse_head(frame) == expected
    assert frame[len(head) : len(head) + tensor.nbytes] == raw_bytes(tensor)


def test_the_head_of_more_than_4_gib_is_understood() -> None:
    head = parse_head(tensor_frame(torch.bfloat16, (5 << 15, 1 << 14)).head)
    assert head is not None
    assert head.data_bytes == 5 << 30


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(60).reshape(6, 10)[1:, 2:9:3],
        torch.arange(60).reshape(6, 10).T,
        torch.nn.Parameter(torch.rand(6, 10)[2:]),
        torch.arange(3)[:, None].expand(3, 4),
        torch.rand(6, 10, dtype=torch.float64).to(torch.float8_e5m2)[3:, 1],
    ],
)
def test_a_view_is_found_in_its_storage(view: torch.Tensor) -> None:
    frame = stock_frame(view)
    head = parse_head(frame)
    assert head is not None
    assert (head.shape, head.stride) == (view.shape, view.stride())
    storage = torch.frombuffer(bytearray(frame), dtype=torch.uint8)[head.data_offset :]
    values = storage[: head.data_bytes].clone().view(head.dtype)
    found = values.as_strided(head.shape, head.stride, head.storage_offset)
    assert raw_bytes(found) == raw_bytes(view.detach())


def test_the_name_in_the_zip_does_not_matter(tmp_path: Path) -> None:
    torch.save(torch.rand(3), tmp_path / "model.pt")
    frame = (tmp_path / "model.pt").read_bytes()
    assert b"model/data/0" in frame
    assert parse_head(frame) is not None


@pytest.mark.parametrize(
    "value",
    [
        3,
        [torch.rand(3)],
        {"a": torch.rand(3)},
        Tagged([1.0]),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.rand(3, 3).to_sparse(),
        torch.rand(3, device="meta"),
        OrderedDict(a=1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_a_plain_tensor_has_no_head(value: object) -> None:
    assert parse_head(stock_frame(value)) is None


def test_a_cut_head_is_none() -> None:
    head = tensor_frame(torch.float8_e4m3fn, (3, 5)).head
    assert all(parse_head(head[:num]) is None for num in range(len(head)))


def test_damaged_bytes_never_raise() -> None:
    head = tensor_frame(torch.float32, (3, 5)).head
    for at in range(len(head)):
        for value in (0, 0x28, 0x8A, 0xFF):
            parse_head(head[:at] + bytes([value]) + head[at + 1 :])


def zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def records_of(frame: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(frame)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_another_zip_writer_is_understood_but_not_its_compression() -> None:
    records = records_of(stock_frame(torch.arange(6)))
    assert parse_head(zipped(records)) is not None
    assert parse_head(zipped(records, zipfile.ZIP_DEFLATED)) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [("archive/byteorder", b"big"), ("archive/.format_version", b"?"), ("archive/else", b"1")],
)
def test_unknown_records_before_the_values_are_refused(name: str, content: bytes) -> None:
    records = records_of(stock_frame(torch.arange(6)))
    pickled = records.pop("archive/data.pkl")
    assert parse_head(zipped({"archive/data.pkl": pickled, **records})) is not None
    records.pop(name, None)
    assert parse_head(zipped({"archive/data.pkl": pickled, name: content, **records})) is None


def test_a_view_that_leaves_its_storage_is_refused() -> None:
    records = records_of(stock_frame(torch.arange(6).reshape(2, 3)))
    pickled = records["archive/data.pkl"]
    assert pickled.count(b"K\x02K\x03\x86") == 1
    records["archive/data.pkl"] = pickled.replace(b"K\x02K\x03\x86", b"K\x03K\x03\x86")
    assert parse_head(zipped(records)) is None


def test_code_in_the_pickle_is_not_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "made"),))

    frame = stock_frame(Hostile())
    assert b"mkdir" in frame
    assert parse_head(frame) is None
    assert not (tmp_path / "made").exists()


def test_a_pickle_nested_too_deep_is_refused() -> None:
    records = records_of(stock_frame(torch.nn.Parameter(torch.rand(2))))
    rebuild = b"ctorch._utils\n_rebuild_parameter\n"
    inner = records["archive/data.pkl"].removeprefix(b"\x80\x02").removesuffix(b".")
    close = b"\x88ccollections\nOrderedDict\n)R\x87R"
    records["archive/data.pkl"] = b"\x80\x02" + rebuild * 3000 + inner + close * 3000 + b"."
    assert parse_head(zipped(records)) is None
