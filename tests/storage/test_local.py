"""LocalStorage: exact bytes by both ways, hashes per chunk, and errors that leave nothing."""

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from backstay import points
from backstay.points import Action
from backstay.storage import image_write
from backstay.storage.local import LocalStorage

CHUNK = 8192
PAGE = 4096


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def storage(tmp_path: Path, notes: list[str]) -> LocalStorage:
    return LocalStorage(root=tmp_path, num_threads=3, chunk_bytes=CHUNK, on_note=notes.append)


@pytest.fixture(autouse=True)
def _no_actions() -> Iterator[None]:
    yield
    points.install([], rank=0)


def make_image(data: bytes, *, before: int = 0, is_padded: bool = True) -> int:
    fd = os.memfd_create("image")
    size = before + len(data)
    os.ftruncate(fd, -(-size // PAGE) * PAGE if is_padded else size)
    os.pwrite(fd, data, before)
    return fd


def write(storage: LocalStorage, data: bytes, **options: int | bool) -> tuple[Path, list[str]]:
    before = int(options.get("before", 0))
    fd = make_image(data, before=before, is_padded=bool(options.get("is_padded", True)))
    try:
        record, stats = storage.write_image(
            "f", image_fd=fd, offset=before, num_bytes=len(data), role="trainable"
        )
    finally:
        os.close(fd)
    assert record.num_bytes == stats.num_bytes == len(data)
    assert stats.direct == storage.direct
    return storage.root / record.path, list(record.chunk_hashes)


SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 123]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_has_the_bytes_of_the_image(storage: LocalStorage, size: int, direct: bool) -> None:
    storage.direct = direct
    data = os.urandom(size)
    path, hashes = write(storage, data, before=PAGE)
    assert path.read_bytes() == data
    assert hashes == [
        xxhash.xxh3_64_hexdigest(data[at : at + CHUNK]) for at in range(0, size, CHUNK)
    ]


def test_an_image_without_a_whole_last_page_is_written_exactly(storage: LocalStorage) -> None:
    data = os.urandom(CHUNK + 77)
    assert write(storage, data, is_padded=False)[0].read_bytes() == data


def test_chunks_larger_than_a_window_have_one_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_write, "WINDOW_BYTES", PAGE)
    storage = LocalStorage(root=tmp_path, chunk_bytes=4 * PAGE)
    data = os.urandom(6 * PAGE + 5)
    path, hashes = write(storage, data)
    assert path.read_bytes() == data
    assert hashes == [
        xxhash.xxh3_64_hexdigest(data[: 4 * PAGE]),
        xxhash.xxh3_64_hexdigest(data[4 * PAGE :]),
    ]


@pytest.mark.parametrize("refused_at", ["open", "write"])
def test_where_direct_writes_are_refused_the_page_cache_is_used(
    storage: LocalStorage, notes: list[str], monkeypatch: pytest.MonkeyPatch, refused_at: str
) -> None:
    real_open, real_pwrite = os.open, os.pwrite

    def refuse_open(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode)

    def refuse_write(fd: int, data: bytes, offset: int) -> int:
        if storage.direct and isinstance(data, memoryview):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(
        os,
        refused_at.replace("write", "pwrite"),
        refuse_open if refused_at == "open" else refuse_write,
    )
    data = os.urandom(3 * CHUNK + 1)
    for _ in range(2):
        assert write(storage, data)[0].read_bytes() == data
    assert [note.partition(": ")[2] for note in notes] == [
        "the file system refuses O_DIRECT; writing through the page cache from now on"
    ]


@pytest.mark.parametrize(
    "point", ["write.create", "write.first_chunk", "write.last_chunk", "write.fsync"]
)
def test_an_error_of_any_thread_is_raised_and_nothing_stays(
    storage: LocalStorage, point: str
) -> None:
    """P11: no thread's error is lost."""
    points.install([Action(point=point, kind="raise", errno_name="EIO")], rank=0)
    with pytest.raises(OSError, match="injected") as caught:
        write(storage, os.urandom(10 * CHUNK))
    assert caught.value.errno == errno.EIO
    assert os.listdir(storage.root) == []


def test_a_chunk_that_no_thread_wrote_is_noticed(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11: a thread that ends early, without an error, does not make the file count as written."""
    monkeypatch.setattr(image_write, "write_chunks", lambda *args, **options: None)
    with pytest.raises(OSError, match="0 chunks were written, 3 were planned"):
        write(storage, os.urandom(3 * CHUNK))


def test_a_short_write_is_continued(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    data = os.urandom(4 * CHUNK)
    fd = make_image(data)
    monkeypatch.setattr(os, "pwrite", lambda fd, piece, at: real(fd, piece[: PAGE + 100], at))
    for storage.direct in (True, False):
        storage.write_image("f", image_fd=fd, offset=0, num_bytes=len(data), role="rng")
        assert (storage.root / "f").read_bytes() == data
    os.close(fd)


def test_a_watch_can_stop_a_write(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_write, "WATCH_EVERY_S", 0.0)

    def stop() -> None:
        raise InterruptedError("another rank failed")

    fd = make_image(os.urandom(9 * CHUNK))
    storage = replace(storage, num_threads=1)  # only the calling thread watches
    with pytest.raises(InterruptedError):
        storage.write_image("f", image_fd=fd, offset=0, num_bytes=9 * CHUNK, role="rng", watch=stop)
    os.close(fd)
    assert os.listdir(storage.root) == []


def test_put_replaces_a_file_as_a_whole(storage: LocalStorage) -> None:
    storage.put("f", b"old")
    storage.put("f", b"new")
    assert storage.read("f") == b"new"
    assert storage.list_names("") == ["f"]
    assert storage.size("f") == 3


def test_a_link_is_a_second_name_and_a_copy_where_that_cannot_be(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("a", b"frozen")
    assert storage.link("a", "b")
    assert (storage.root / "a").samefile(storage.root / "b")

    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert not storage.link("a", "c")
    assert storage.read("c") == b"frozen"
    assert not (storage.root / "a").samefile(storage.root / "c")


def test_directories_are_made_published_and_deleted(storage: LocalStorage) -> None:
    storage.make_dir("draft/weights")
    storage.make_dir("draft/weights")
    storage.publish("draft", "final")
    assert storage.is_dir("final/weights")
    assert not storage.exists("draft")
    storage.delete_dir("final/weights")
    storage.delete_dir("final/weights")
    storage.delete_file("final/nothing")
    assert storage.list_names("final") == storage.list_names("nowhere") == []


def test_the_writer_maps_small_windows() -> None:
    assert image_write.WINDOW_BYTES % mmap.PAGESIZE == 0


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was handed to fsync, which still runs."""
    names: list[str] = []
    fsync = os.fsync

    def spy(fd: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    return names


def test_an_image_is_on_the_disk_before_it_counts_as_written(
    storage: LocalStorage, synced: list[str]
) -> None:
    write(storage, b"x" * (3 * CHUNK + 1))
    assert "f" in synced


def test_a_put_syncs_the_content_and_then_the_directory(
    storage: LocalStorage, tmp_path: Path, synced: list[str]
) -> None:
    storage.put("f", b"x")
    assert len(synced) == 2
    assert synced[1] == tmp_path.name


def test_publishing_syncs_the_directory_that_holds_the_new_name(
    storage: LocalStorage, tmp_path: Path, synced: list[str]
) -> None:
    storage.make_dir("a")
    synced.clear()
    storage.publish("a", "b")
    assert synced == [tmp_path.name]
