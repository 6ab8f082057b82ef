"""The limits of disk and memory: plain programs that move the same bytes and do nothing else."""

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

PAGE_BYTES = 4096
PIECE_BYTES = 8 << 20
NUM_THREADS = 4


def on_threads(work: Callable[[int], None]) -> None:
    """Run `work(number)` on some threads; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def raw_write(path: Path, num_bytes: int) -> float:
    """Seconds that a plain program needs to write a file: O_DIRECT, large pieces, a few threads, fsync."""
    num_bytes = round_up(num_bytes)
    pattern = os.urandom(PIECE_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    began = time.perf_counter()
    try:
        os.posix_fallocate(fd, 0, num_bytes)

        def work(number: int) -> None:
            with mmap.mmap(-1, PIECE_BYTES) as piece, memoryview(piece) as view:
                view[:] = pattern
                for start, size in pieces(num_bytes, number):
                    with view[:size] as part:
                        check_size(os.pwrite(fd, part, start), size)

        on_threads(work)
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def raw_read(paths: Sequence[Path], *, direct: bool) -> float:
    """Seconds that a plain program needs to read files, past the page cache or out of it."""
    began = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        size = os.fstat(fd).st_size

        def work(number: int, fd: int = fd, num_bytes: int = size) -> None:
            with mmap.mmap(-1, PIECE_BYTES) as piece, memoryview(piece) as view:
                for start, length in pieces(round_up(num_bytes), number):
                    with view[:length] as part:
                        check_size(os.preadv(fd, [part], start), min(length, num_bytes - start))

        try:
            on_threads(work)
        finally:
            os.close(fd)
    return time.perf_counter() - began


def pieces(num_bytes: int, number: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the pieces of one thread."""
    for start in range(number * PIECE_BYTES, num_bytes, NUM_THREADS * PIECE_BYTES):
        yield start, min(PIECE_BYTES, num_bytes - start)


def check_size(found: int, expected: int) -> None:
    """Benchmarks do not go on after short reads and writes."""
    if found != expected:
        raise OSError(f"{found} bytes were transferred, expected {expected}")


def round_up(num_bytes: int) -> int:
    """The next multiple of a page."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def copy_memory(num_bytes: int) -> float:
    """Seconds that one thread needs to copy so many bytes between buffers larger than the caches."""
    size = min(num_bytes, 256 << 20)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    began = time.perf_counter()
    for _ in range(max(1, num_bytes // size)):
        target.copy_(source)
    return (time.perf_counter() - began) * num_bytes / (max(1, num_bytes // size) * size)


def data_files(directory: Path) -> list[Path]:
    """The data files of a checkpoint."""
    return sorted(directory.rglob("*.distcp"))


def evict(directory: Path) -> None:
    """Drop the files below a directory from the page cache."""
    for path in filter(Path.is_file, directory.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cached_share(paths: Sequence[Path], *, num_probes: int = 256) -> float:
    """Which part of files is in the page cache, by probes that never touch the disk."""
    hits = probes = 0
    page = bytearray(PAGE_BYTES)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        for start in range(0, size, max(PAGE_BYTES, size // num_probes)):
            probes += 1
            with contextlib.suppress(BlockingIOError):
                hits += os.preadv(fd, [page], start, os.RWF_NOWAIT) > 0
        os.close(fd)
    return hits / max(1, probes)
