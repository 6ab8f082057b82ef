"""FileImage: the shared-memory buffer that is, byte for byte, what the writer will put into a file.

Runs in: the trainer; `prefault` starts a daemon thread that touches pages and nothing else. Guarantees: one descriptor per image; the memory
is anonymous, so that nothing is left behind however the process ends; the content is never changed by pre-faulting.
"""

import ctypes
import errno
import mmap
import os
import threading

import torch
from torch import Tensor

from backstay.save.layout import PAGE_BYTES, round_up

MADV_POPULATE_WRITE = 23
# Short enough that a closing trainer does not wait, long enough to be fast.
PREFAULT_STRIDE_BYTES = 32 << 20


class FileImage:
    """Anonymous shared memory of at least `num_bytes`, mapped here, to be attached by the writer through `fd`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = round_up(max(num_bytes, 1), PAGE_BYTES)
        self.fd = os.memfd_create("backstay-image", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.num_bytes)
            self._mapping = mmap.mmap(self.fd, self.num_bytes)
        except OSError:
            os.close(self.fd)
            raise
        self.bytes: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._is_closing = threading.Event()
        self._prefault: threading.Thread | None = None
        self._is_pinned = False

    def put(self, offset: int, data: bytes | bytearray, reserved: int | None = None) -> None:
        """Write bytes; what is left of `reserved` becomes zero."""
        end = offset + len(data)
        self._mapping[offset:end] = data
        if reserved is not None and reserved > len(data):
            self._mapping[end : offset + reserved] = bytes(reserved - len(data))

    def view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor in the image; `offset` is a multiple of its item size."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def prefault(self, *, pin_for_cuda: bool = False) -> None:
        """Start to make all pages present, in the background, so that the first save is as fast as any other.

        Args:
            pin_for_cuda: page-lock them as well, so that device copies are asynchronous and at full speed.
        """
        if self._prefault is None:
            self._prefault = threading.Thread(
                target=self._populate, args=(pin_for_cuda,), name="backstay-prefault", daemon=True
            )
            self._prefault.start()

    def wait_prefaulted(self) -> None:
        """Return when pre-faulting is over."""
        if self._prefault is not None:
            self._prefault.join()

    def close(self) -> None:
        """Give the memory back, as soon as nobody holds a view of it."""
        self._is_closing.set()
        self.wait_prefaulted()
        if self._is_pinned:
            unpin(self.bytes)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        # The mapping goes with the last tensor that refers to it.
        del self.bytes, self._mapping

    def _populate(self, pin_for_cuda: bool) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        address = self.bytes.data_ptr()
        for start in range(0, self.num_bytes, PREFAULT_STRIDE_BYTES):
            if self._is_closing.is_set():
                return
            length = min(PREFAULT_STRIDE_BYTES, self.num_bytes - start)
            if libc.madvise(address + start, length, MADV_POPULATE_WRITE) != 0:
                if ctypes.get_errno() == errno.EINVAL:  # Linux before 5.14
                    os.posix_fallocate(self.fd, start, length)
                else:
                    return  # out of memory here is reported by whoever needs the page
        if pin_for_cuda:
            self._is_pinned = pin(self.bytes)


def pin(buffer: Tensor) -> bool:
    """Page-lock host memory for CUDA; whether it worked."""
    if not torch.cuda.is_available():
        return False
    cudart = torch.cuda.cudart()
    return int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0


def unpin(buffer: Tensor) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
