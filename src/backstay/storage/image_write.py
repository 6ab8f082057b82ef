"""Write a range of a shared-memory image as a file: chunks in parallel, past the page cache, hashed on the way.

Runs in: the writer; a few short-lived threads per file. Guarantees: the first error of any thread stops the others and is
raised; a file counts as written only when every planned chunk was. Assumes: nobody changes the image meanwhile.
"""

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from backstay import points

PAGE_BYTES = 4096
# What a thread maps at once: large enough for the disk, small enough that a few of them keep the writer's memory flat.
WINDOW_BYTES = 2 << 20
WATCH_EVERY_S = 0.25

_libc = ctypes.CDLL(None, use_errno=True)


class DirectRefused(OSError):
    """The file system took O_DIRECT at open but not at the first write."""


@dataclass(frozen=True, kw_only=True)
class ImageRange:
    """The bytes to write and how they are cut: chunk `i` starts at `i * chunk_bytes` and is hashed by itself."""

    fd: int
    offset: int
    num_bytes: int
    chunk_bytes: int

    @property
    def num_chunks(self) -> int:
        """How many chunks there are, the last may be shorter."""
        return -(-self.num_bytes // self.chunk_bytes)

    def windows(self, chunk: int) -> list[tuple[int, int]]:
        """(start, size) of the pieces in which a chunk is mapped."""
        start, end = chunk * self.chunk_bytes, min((chunk + 1) * self.chunk_bytes, self.num_bytes)
        return [(at, min(WINDOW_BYTES, end - at)) for at in range(start, end, WINDOW_BYTES)]


@dataclass
class Progress:
    """What the threads that write one file share."""

    hashes: list[str]
    next_chunk: "itertools.count[int]" = field(default_factory=itertools.count)
    error: BaseException | None = None
    hash_seconds: float = 0.0
    cpu_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: BaseException) -> None:
        """Keep the first error; the others stop when they see it."""
        with self.lock:
            self.error = self.error or error


class Throttle:
    """A token bucket shared by all threads: at most so many bytes per second on average, a short burst allowed."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may be written."""
        if self._bytes_per_s <= 0:
            return
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + num_bytes / self._bytes_per_s
        time.sleep(max(0.0, begin - time.monotonic()))


def write_range(
    fd: int,
    source: ImageRange,
    *,
    direct: bool,
    num_threads: int,
    throttle: Throttle,
    watch: Callable[[], None] | None,
) -> Progress:
    """Write all chunks of `source` into the file `fd`, from its beginning; the last page is padded if `direct`.

    Raises:
        DirectRefused: only a buffered write can work.
        OSError: of the first thread that failed, or whatever `watch` raised.
    """
    progress = Progress(hashes=[""] * source.num_chunks)

    def work(watch: Callable[[], None] | None = None) -> None:
        began_cpu = time.thread_time()
        try:
            write_chunks(fd, source, progress, direct=direct, throttle=throttle, watch=watch)
        except BaseException as error:  # raised again by the calling thread
            progress.fail(error)
        with progress.lock:
            progress.cpu_seconds += time.thread_time() - began_cpu

    threads = [
        threading.Thread(target=work, daemon=True)
        for _ in range(min(num_threads, source.num_chunks) - 1)
    ]
    for thread in threads:
        thread.start()
    work(watch)
    for thread in threads:
        thread.join()
    if progress.error is not None:
        raise progress.error
    num_written = sum(map(bool, progress.hashes))
    if num_written != source.num_chunks:
        raise OSError(
            errno.EIO, f"{num_written} chunks were written, {source.num_chunks} were planned"
        )
    return progress


def write_chunks(
    fd: int,
    source: ImageRange,
    progress: Progress,
    *,
    direct: bool,
    throttle: Throttle,
    watch: Callable[[], None] | None,
) -> None:
    """One thread's part: take chunks until there are no more or another thread failed."""
    watch_at = time.monotonic() + WATCH_EVERY_S
    while progress.error is None and (chunk := next(progress.next_chunk)) < source.num_chunks:
        if chunk == 0:
            points.reach("write.first_chunk")
        if chunk == source.num_chunks - 1:
            points.reach("write.last_chunk")
        hasher = xxhash.xxh3_64()
        for start, size in source.windows(chunk):
            throttle.take(size)
            seconds = write_window(fd, source, start, size, hasher, direct=direct)
            with progress.lock:
                progress.hash_seconds += seconds
            if progress.error is not None:
                return
            if watch is not None and time.monotonic() >= watch_at:
                watch()
                watch_at = time.monotonic() + WATCH_EVERY_S
        progress.hashes[chunk] = hasher.hexdigest()


def write_window(
    fd: int, source: ImageRange, start: int, size: int, hasher: "xxhash.xxh3_64", *, direct: bool
) -> float:
    """Hash and write one window; returns the seconds spent hashing."""
    padded = -(-size // PAGE_BYTES) * PAGE_BYTES if direct else size
    window = map_window(source.fd, source.offset + start, size=size, padded=padded)
    try:
        with memoryview(window) as view:
            began = time.thread_time()
            with view[:size] as exact:
                hasher.update(exact)
            seconds = time.thread_time() - began
            with view[:padded] as data:
                write_all(fd, data, start, direct=direct)
        return seconds
    finally:
        window.close()


def map_window(fd: int, offset: int, *, size: int, padded: int) -> mmap.mmap:
    """Map a piece of the image; a last page that the image does not have in full is copied."""
    if os.fstat(fd).st_size >= offset + padded:
        return mmap.mmap(
            fd,
            padded,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ,
            offset=offset,
        )
    copy = mmap.mmap(-1, padded)
    with memoryview(copy) as view, view[:size] as exact:
        num_read = os.preadv(fd, [exact], offset)
    if num_read != size:
        copy.close()
        raise OSError(errno.EIO, f"the image has {num_read} bytes at {offset}, expected {size}")
    return copy


def write_all(fd: int, data: memoryview, start: int, *, direct: bool) -> None:
    """pwrite until all is written."""
    done = 0
    while done < len(data):
        try:
            with data[done:] as rest:
                num = os.pwrite(fd, rest, start + done)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                raise DirectRefused(error.errno, "O_DIRECT write refused") from error
            raise
        # A short direct write has to go on at a page.
        num -= num % PAGE_BYTES if direct else 0
        if num <= 0:
            raise OSError(errno.ENOSPC, f"no more bytes were taken at offset {start + done}")
        done += num


def reserve(fd: int, num_bytes: int) -> None:
    """Take the space of a file before its data is written, so that a full disk is known early.

    Not posix_fallocate: where the file system can't reserve, that writes to every block.
    """
    size = ctypes.c_long(num_bytes)
    while _libc.fallocate(fd, 0, ctypes.c_long(0), size) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.ftruncate(fd, num_bytes)
            return
        raise OSError(code, os.strerror(code))
