"""Ask the page cache whether a file is in it, without changing that."""

import os
from collections.abc import Sequence
from pathlib import Path

NUM_PROBES = 8
# Between two places of one large slice that may be asked for.
MIN_STEP_BYTES = 16 << 20


def is_cold(path: Path, slices: Sequence[tuple[int, int]]) -> bool:
    """Whether most of a file is not in the page cache, judged by some places of it.

    Args:
        path: the file.
        slices: of it (offset, length) that matter.

    Returns:
        False also if nobody can tell.

    Raises:
        OSError: the file cannot be opened.
    """
    offsets = sorted(offset for each in slices for offset in _offsets(*each))
    chosen = offsets[:: max(1, -(-len(offsets) // NUM_PROBES))]
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_cached = sum(_is_cached(fd, offset) for offset in chosen)
    except OSError:
        return False
    finally:
        os.close(fd)
    return 2 * num_cached < len(chosen)


def _offsets(offset: int, length: int) -> Sequence[int]:
    """Places of a slice to choose from: of a large one, more."""
    return range(offset, offset + length, max(length // NUM_PROBES, MIN_STEP_BYTES))


def _is_cached(fd: int, offset: int) -> bool:
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
