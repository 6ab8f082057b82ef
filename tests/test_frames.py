"""Frames made before there are values are, byte for byte, what torch.save writes with them."""

import io

import pytest
import torch

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
