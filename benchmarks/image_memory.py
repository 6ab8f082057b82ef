"""What fresh shared memory costs, by how it is prepared: `python -m benchmarks.image_memory [--gib 1]`.

Prints GB/s (10^9 bytes) of preparing an image, of the first copy into it, and of hashing it through
short-lived windows. The first round is thrown away: a virtual machine's host has its own first touch.
"""

import argparse
import ctypes
import mmap
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import torch
import xxhash

MADV_POPULATE_WRITE = 23
WINDOW_BYTES = 8 << 20


def measure(num_bytes: int, num_rounds: int) -> dict[str, list[float]]:
    """The speeds of each round by name, in GB/s."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    speeds: dict[str, list[float]] = defaultdict(list)
    for number in range(num_rounds + 1):
        for preparation in ("nothing", "fallocate", "populate"):
            found = measure_image(source, preparation)
            if number:
                for name, speed in found.items():
                    speeds[name].append(speed)
    return speeds


def measure_image(source: torch.Tensor, preparation: str) -> dict[str, float]:
    """One image, prepared and filled."""
    fd = os.memfd_create("image")
    os.ftruncate(fd, source.nbytes)
    mapping = mmap.mmap(fd, source.nbytes)
    image = torch.frombuffer(mapping, dtype=torch.uint8)
    speed: dict[str, float] = {}

    def clock(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        speed[name] = source.nbytes / (time.perf_counter() - began) / 1e9

    if preparation == "fallocate":
        clock("fallocate", lambda: os.posix_fallocate(fd, 0, source.nbytes))
    elif preparation == "populate":
        clock("populate", lambda: populate(image))
    clock(f"first copy after {preparation}", lambda: image.copy_(source))
    if preparation == "populate":
        clock("second copy", lambda: image.copy_(source))
        for num_threads in (1, 2):
            clock(f"hash, {num_threads} threads", lambda n=num_threads: hash_all(fd, image, n))
    os.close(fd)
    return speed


def populate(image: torch.Tensor) -> None:
    """Make every page of the mapping present and writable."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(image.data_ptr(), image.nbytes, MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), "madvise(MADV_POPULATE_WRITE) failed; Linux >= 5.14?")


def hash_all(fd: int, image: torch.Tensor, num_threads: int) -> None:
    """Hash the image as a writer does, windows taken in turn."""

    def work(first: int) -> None:
        for offset in range(first * WINDOW_BYTES, image.nbytes, num_threads * WINDOW_BYTES):
            length = min(WINDOW_BYTES, image.nbytes - offset)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            with mmap.mmap(fd, length, flags=flags, prot=mmap.PROT_READ, offset=offset) as window:
                xxhash.xxh3_64_intdigest(window)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the image (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default: 5)")
    options = parser.parse_args()
    speeds = measure(int(options.gib * (1 << 30)) // 4096 * 4096, options.rounds)
    print(f"{'GB/s':28}{'min':>8}{'median':>8}{'max':>8}")
    for name, found in speeds.items():
        print(f"{name:28}{min(found):8.2f}{statistics.median(found):8.2f}{max(found):8.2f}")


if __name__ == "__main__":
    main()
