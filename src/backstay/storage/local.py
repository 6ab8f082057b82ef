"""LocalStorage: checkpoints in a POSIX file system, local or shared.

Runs in: the writer. Guarantees: what `put`, `write_image`, `rename` and `publish` made survives a power cut once they return.
"""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from backstay import points
from backstay.manifest import FileRecord
from backstay.storage.base import Storage, WriteStats
from backstay.storage.image_write import (
    PAGE_BYTES,
    DirectRefused,
    ImageRange,
    Progress,
    Throttle,
    reserve,
    write_range,
)

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)


@dataclass(kw_only=True)
class LocalStorage(Storage):
    """Files under `root`.

    Attributes:
        num_threads: parallel writes of one image.
        chunk_bytes: unit of hashing; a multiple of the page size.
        bandwidth_bytes_per_s: cap over all threads; 0 means none.
        on_note: told, once, what works less well than it could.
        direct: whether O_DIRECT is tried; becomes False when the file system refuses it.
    """

    root: Path
    num_threads: int = 4
    chunk_bytes: int = 4 << 20
    bandwidth_bytes_per_s: int = 0
    on_note: Callable[[str], None] = print
    direct: bool = True
    throttle: Throttle = field(init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.chunk_bytes % PAGE_BYTES == 0, "a chunk is a whole number of pages"
        self.throttle = Throttle(self.bandwidth_bytes_per_s)

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
        """See `Storage.write_image`."""
        began = time.monotonic()
        source = ImageRange(
            fd=image_fd, offset=offset, num_bytes=num_bytes, chunk_bytes=self.chunk_bytes
        )
        points.reach("write.create")
        try:
            progress = self._write_file(self.root / path, source, watch)
        except BaseException as error:
            (self.root / path).unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(self.root / path)
            raise
        record = FileRecord(
            path=path,
            num_bytes=num_bytes,
            chunk_bytes=self.chunk_bytes,
            chunk_hashes=tuple(progress.hashes),
            role=role,
        )
        stats = WriteStats(
            num_bytes=num_bytes,
            seconds=time.monotonic() - began,
            hash_seconds=progress.hash_seconds,
            cpu_seconds=progress.cpu_seconds,
            direct=self.direct,
        )
        return record, stats

    def _write_file(
        self, path: Path, source: ImageRange, watch: Callable[[], None] | None
    ) -> Progress:
        if self.direct:
            try:
                return self._write_file_as(path, source, watch, direct=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.direct = False
                self.on_note(
                    f"{path.parent}: the file system refuses O_DIRECT; writing through the page cache from now on"
                )
        return self._write_file_as(path, source, watch, direct=False)

    def _write_file_as(
        self, path: Path, source: ImageRange, watch: Callable[[], None] | None, *, direct: bool
    ) -> Progress:
        flags = (
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        )
        try:
            fd = os.open(path, flags, 0o666)
        except OSError as error:
            if direct and error.errno == errno.EINVAL:
                raise DirectRefused(error.errno, "O_DIRECT open refused") from error
            raise
        try:
            if source.num_bytes:
                reserve(
                    fd,
                    -(-source.num_bytes // PAGE_BYTES) * PAGE_BYTES if direct else source.num_bytes,
                )
            progress = write_range(
                fd,
                source,
                direct=direct,
                num_threads=self.num_threads,
                throttle=self.throttle,
                watch=watch,
            )
            os.ftruncate(fd, source.num_bytes)
            points.reach("write.fsync")
            os.fsync(fd)
            if not direct:
                # These pages would push the trainer's own files out of memory, and nobody reads them soon.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return progress
        finally:
            os.close(fd)

    def put(self, path: str, data: bytes) -> None:
        """See `Storage.put`."""
        put_file(self.root / path, data)

    def read(self, path: str) -> bytes:
        """See `Storage.read`."""
        return (self.root / path).read_bytes()

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return os.path.lexists(self.root / path)

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        return (self.root / path).lstat().st_size

    def list_names(self, path: str) -> list[str]:
        """See `Storage.list_names`."""
        try:
            return sorted(os.listdir(self.root / path))
        except FileNotFoundError:
            return []

    def is_dir(self, path: str) -> bool:
        """See `Storage.is_dir`."""
        full = self.root / path
        return full.is_dir() and not full.is_symlink()

    def make_dir(self, path: str) -> None:
        """See `Storage.make_dir`."""
        make_directory(self.root / path)

    def link(self, source: str, target: str) -> bool:
        """See `Storage.link`."""
        try:
            os.link(self.root / source, self.root / target, follow_symlinks=False)
            return True
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
        copy_file(self.root / source, self.root / target)
        return False

    def rename(self, source: str, target: str) -> None:
        """See `Storage.rename`."""
        os.rename(self.root / source, self.root / target)
        sync_directory((self.root / target).parent)

    def publish(self, source_dir: str, target_dir: str) -> None:
        """See `Storage.publish`."""
        os.rename(self.root / source_dir, self.root / target_dir)
        points.reach("commit.fsync_parent")
        sync_directory((self.root / target_dir).parent)

    def delete_file(self, path: str) -> None:
        """See `Storage.delete_file`."""
        (self.root / path).unlink(missing_ok=True)

    def delete_dir(self, path: str) -> None:
        """See `Storage.delete_dir`."""
        try:
            (self.root / path).rmdir()
        except FileNotFoundError:
            return

    def sync_dir(self, path: str) -> None:
        """See `Storage.sync_dir`."""
        sync_directory(self.root / path)


def put_file(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all, and durably."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            written = 0
            while written < len(data):
                written += os.write(fd, data[written:])
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable; file systems that know no such thing are believed."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def make_directory(path: Path) -> None:
    """Make a directory and those above it, each one's name durable in its parent."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise
    sync_directory(path.parent)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file durably; the target must not exist."""
    with source.open("rb") as reader:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            left = os.fstat(reader.fileno()).st_size
            while left:
                num = os.sendfile(fd, reader.fileno(), None, min(left, 1 << 30))
                if num == 0:
                    raise OSError(errno.EIO, f"{source} shrank while it was copied")
                left -= num
            os.fsync(fd)
        except OSError:
            target.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
