"""The side image: small files that come anew with each save, packed into one piece of shared memory."""

import os
from dataclasses import dataclass, field

from backstay.save.layout import PAGE_BYTES, round_up
from backstay.save.messages import FileSource


@dataclass
class SideImage:
    """Small files of one save, for the writer; the memory is anonymous and belongs to whoever holds the descriptor.

    Attributes:
        fd: descriptor to be sent along.
        num_bytes: used so far; a multiple of the page size.
    """

    fd: int = field(default_factory=lambda: os.memfd_create("backstay-side", os.MFD_CLOEXEC))
    num_bytes: int = 0

    def add(self, data: bytes) -> int:
        """Add bytes; returns where they begin."""
        offset = self.num_bytes
        self.num_bytes = offset + round_up(max(len(data), 1), PAGE_BYTES)
        os.ftruncate(self.fd, self.num_bytes)
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], offset + written)
        return offset

    def add_file(self, path: str, role: str, data: bytes) -> FileSource:
        """Add a file of the checkpoint."""
        return FileSource(path=path, role=role, num_bytes=len(data), offset=self.add(data))

    def close(self) -> None:
        """Let go of the memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
