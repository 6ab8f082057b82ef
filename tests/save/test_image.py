"""File images: shared memory that the writer sees through a descriptor, made present in the background, given back when closed."""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_trainer import wait_until

from backstay.save import image
from backstay.save.image import FileImage
from backstay.save.layout import PAGE_BYTES
from backstay.save.side import SideImage

SIZE = 64 << 20


@pytest.fixture
def small() -> Iterator[FileImage]:
    made = FileImage(3 * PAGE_BYTES)
    yield made
    made.close()


def num_mappings() -> int:
    """Of images, in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:backstay-image")


def resident_bytes(fd: int) -> int:
    """Memory that the descriptor's pages take."""
    return os.fstat(fd).st_blocks * 512


def test_an_image_is_zeros_in_whole_pages() -> None:
    for asked, got in [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)]:
        made = FileImage(asked)
        assert made.num_bytes == got == os.fstat(made.fd).st_size == made.bytes.numel()
        assert os.pread(made.fd, got, 0) == bytes(got)
        made.close()


def test_what_is_copied_into_a_view_is_seen_through_the_descriptor(small: FileImage) -> None:
    value = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    small.view(64, torch.float64, (2, 3)).copy_(value)
    assert os.pread(small.fd, 48, 64) == value.numpy().tobytes()
    assert os.pread(small.fd, 64, 0) == bytes(64)
    assert os.pread(small.fd, 64, 112) == bytes(64)


def test_what_others_write_through_the_descriptor_is_seen_in_a_view(small: FileImage) -> None:
    os.pwrite(small.fd, torch.tensor([7, 8]).numpy().tobytes(), 128)
    assert small.view(128, torch.int64, (2,)).tolist() == [7, 8]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128], ids=str
)
def test_a_view_has_any_dtype_and_may_be_0_dim_or_empty(
    small: FileImage, dtype: torch.dtype
) -> None:
    assert small.view(64, dtype, ()).shape == ()
    assert small.view(64, dtype, (0, 3)).shape == (0, 3)
    small.view(64, dtype, (2, 2)).copy_(torch.ones(2, 2).to(dtype))
    expected = torch.ones(4).to(dtype).view(torch.uint8).numpy().tobytes()
    assert os.pread(small.fd, len(expected), 64) == expected


def test_put_writes_at_its_offset_and_nowhere_else(small: FileImage) -> None:
    small.put(0, b"\xff" * small.num_bytes)
    small.put(5000, b"hello")
    content = os.pread(small.fd, small.num_bytes, 0)
    assert content == b"\xff" * 5000 + b"hello" + b"\xff" * (small.num_bytes - 5005)


def test_put_zeroes_the_rest_of_the_reserved_room(small: FileImage) -> None:
    small.put(0, b"\xff" * small.num_bytes)
    small.put(64, b"a long value", 32)
    small.put(64, b"short", 32)
    assert os.pread(small.fd, 98, 0) == b"\xff" * 64 + b"short" + bytes(27) + b"\xff" * 2


def test_put_may_fill_the_reserved_room_exactly(small: FileImage) -> None:
    small.put(0, b"\xff" * small.num_bytes)
    small.put(0, b"x" * 32, 32)
    assert os.pread(small.fd, 33, 0) == b"x" * 32 + b"\xff"


def test_put_behind_the_end_is_refused(small: FileImage) -> None:
    with pytest.raises((ValueError, IndexError)):
        small.put(small.num_bytes - 2, b"abc")


def test_prefaulting_makes_every_page_present() -> None:
    made = FileImage(SIZE)
    assert resident_bytes(made.fd) == 0
    made.prefault()
    made.wait_prefaulted()
    assert resident_bytes(made.fd) == SIZE
    made.close()


def test_prefaulting_never_changes_what_is_written_meanwhile() -> None:
    made = FileImage(SIZE)
    pages = made.view(0, torch.int64, (SIZE // PAGE_BYTES, PAGE_BYTES // 8))
    numbers = torch.arange(1, len(pages) + 1)
    pages[::2, 0] = numbers[::2]
    made.prefault()
    pages[1::2, 0] = numbers[1::2]
    made.wait_prefaulted()
    assert torch.equal(pages[:, 0], numbers)
    assert not pages[:, 1:].any()
    del pages
    made.close()


def test_prefaulting_by_fallocate_changes_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.14 answers EINVAL to the advice; so does any Linux to a number that is none."""
    monkeypatch.setattr(image, "MADV_POPULATE_WRITE", 12345)
    made = FileImage(SIZE)
    made.put(PAGE_BYTES, b"before")
    made.prefault()
    made.wait_prefaulted()
    assert resident_bytes(made.fd) == SIZE
    assert os.pread(made.fd, 6, PAGE_BYTES) == b"before"
    made.close()


def test_prefaulting_twice_is_prefaulting_once(small: FileImage) -> None:
    small.prefault()
    first = small._prefault
    small.prefault()
    assert small._prefault is first


def test_waiting_without_prefaulting_returns_at_once(small: FileImage) -> None:
    small.wait_prefaulted()
    assert resident_bytes(small.fd) == 0


def test_closing_during_prefaulting_does_not_wait_for_its_end(
    monkeypatch: pytest.MonkeyPatch, num_fds: Callable[[], int]
) -> None:
    """A page at a time, the whole image would take a second."""
    monkeypatch.setattr(image, "PREFAULT_STRIDE_BYTES", PAGE_BYTES)
    before = num_fds()
    made = FileImage(2 << 30)
    fd = os.dup(made.fd)
    made.prefault()
    wait_until(lambda: resident_bytes(fd) > 0)
    made.close()
    assert not any(each.name == "backstay-prefault" for each in threading.enumerate())
    assert 0 < resident_bytes(fd) < made.num_bytes
    os.close(fd)
    assert num_fds() == before


def test_an_image_that_is_too_large_leaves_no_descriptor(num_fds: Callable[[], int]) -> None:
    before = num_fds()
    with pytest.raises(OSError, match=r"\[Errno"):
        FileImage(1 << 62)
    assert num_fds() == before


def test_a_hundred_images_leak_nothing(num_fds: Callable[[], int]) -> None:
    before = num_fds(), num_mappings(), threading.active_count()
    for _ in range(100):
        made = FileImage(1 << 20)
        made.view(0, torch.float32, (4,)).fill_(1)
        made.prefault()
        made.close()
    del made
    gc.collect()
    assert (num_fds(), num_mappings(), threading.active_count()) == before


def test_memory_stays_while_somebody_holds_a_view() -> None:
    before = num_mappings()
    made = FileImage(PAGE_BYTES)
    view = made.view(0, torch.uint8, (3,))
    view.fill_(9)
    made.close()
    assert view.tolist() == [9, 9, 9]
    del view
    assert num_mappings() == before


def test_a_side_image_gives_every_file_pages_of_its_own() -> None:
    side = SideImage()
    files = [b"first", b"", bytes(range(256)) * 20, b"last"]
    offsets = [side.add(content) for content in files]
    assert offsets == [0, 4096, 8192, 16384]
    assert side.num_bytes == os.fstat(side.fd).st_size == 20480
    assert [os.pread(side.fd, len(f), at) for f, at in zip(files, offsets, strict=True)] == files
    side.close()


def test_a_file_of_a_side_image_says_where_it_lies() -> None:
    side = SideImage()
    side.add(b"x")
    source = side.add_file("state.json", "trainable", b'{"a": 1}')
    assert (source.path, source.role, source.num_bytes, source.offset) == (
        "state.json",
        "trainable",
        8,
        4096,
    )
    assert os.pread(side.fd, source.num_bytes, source.offset) == b'{"a": 1}'
    side.close()


def test_closing_a_side_image_twice_does_not_close_a_stranger(num_fds: Callable[[], int]) -> None:
    before = num_fds()
    side = SideImage()
    side.add(b"x")
    side.close()
    stranger = os.open("/dev/null", os.O_RDONLY)
    side.close()
    os.fstat(stranger)
    os.close(stranger)
    assert num_fds() == before
