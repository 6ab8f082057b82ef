"""Storage: where the bytes of checkpoints live. The one abstract class of Backstay.

All paths are relative to the storage's root, with forward slashes; "" is the root itself. Operations that a save needs to be
durable are durable when they return.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from backstay.manifest import FileRecord


@dataclass(frozen=True, kw_only=True)
class WriteStats:
    """What writing one file took.

    Attributes:
        seconds: wall time, fsync included.
        hash_seconds: processor time spent hashing, summed over threads.
        cpu_seconds: processor time of all threads.
        direct: whether the page cache was bypassed.
    """

    num_bytes: int
    seconds: float
    hash_seconds: float
    cpu_seconds: float
    direct: bool


class Storage(ABC):
    """Files and directories under one root."""

    @abstractmethod
    def write_image(
        self,
        path: str,
        *,
        image_fd: int,
        offset: int,
        num_bytes: int,
        role: str,
        watch: Callable[[], None] | None = None,
    ) -> tuple[FileRecord, WriteStats]:
        """Write `num_bytes` of a shared-memory image, from `offset` on, as a new durable file, hashing on the way.

        Args:
            offset: a multiple of the page size.
            role: goes into the record.
            watch: called now and then while writing; what it raises stops the write.

        Returns:
            The record, whose path is `path`, and what it took.

        Raises:
            OSError: the file could not be written whole; nothing of it is left.
        """

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a small file that appears whole or not at all."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a small file."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Size of a file in bytes; FileNotFoundError if there is none."""

    @abstractmethod
    def list_names(self, path: str) -> list[str]:
        """Names in a directory, sorted; none for a directory that is not there."""

    @abstractmethod
    def is_dir(self, path: str) -> bool:
        """Whether a directory (not a link to one) is there."""

    @abstractmethod
    def make_dir(self, path: str) -> None:
        """Make a directory and those above it; nothing happens where they are there."""

    @abstractmethod
    def link(self, source: str, target: str) -> bool:
        """Give a committed file a second name, or copy it where that cannot be; whether it was linked."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Give a file or directory another name in the same parent, durably."""

    @abstractmethod
    def publish(self, source_dir: str, target_dir: str) -> None:
        """Make a finished directory visible under its final name, all at once and durably."""

    @abstractmethod
    def delete_file(self, path: str) -> None:
        """Delete a file; nothing happens if it is gone."""

    @abstractmethod
    def delete_dir(self, path: str) -> None:
        """Delete an empty directory; nothing happens if it is gone."""

    @abstractmethod
    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
