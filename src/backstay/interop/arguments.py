"""Arguments that the storage writer and the storage reader share: a local path, a number of threads."""

import os
from pathlib import Path

from backstay.errors import InvalidArgument


def is_local(path: str | os.PathLike[str]) -> bool:
    """Whether a path is one of a file system, not a URL."""
    return "://" not in os.fspath(path)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a checkpoint."""
    found = Path(path).absolute()
    if not is_local(path) or not found.name:
        raise InvalidArgument(
            f"{os.fspath(path)!r}: expected the path of a checkpoint's directory in a local or mounted file system"
        )
    return found


def check_num_threads(num_threads: int) -> None:
    """Raise InvalidArgument if there would be none."""
    if num_threads < 1:
        raise InvalidArgument(f"num_threads={num_threads}: expected at least 1")
