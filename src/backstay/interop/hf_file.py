"""Write tensors to their planned places in safetensors files, in any order, and open the files again to see that they hold the plan.

Guarantees: every planned tensor is written exactly once, and a complete file is durable. Memory: what a tensor that is not contiguous,
or on another device, takes as a copy.
"""

import errno
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backstay.errors import ExportFailed
from backstay.interop.hf_plan import DTYPE_NAMES, METADATA, ExportPlan, FilePlan, Slot

# What is written is made durable so often, so that no wait for the disk is long, and the page cache stays the trainer's.
SYNC_BYTES = 256 << 20
WRITE_BYTES = 64 << 20


class TensorFiles:
    """The files of one export while they are written.

    Args:
        folder: where they are made; they must not be there.
    """

    def __init__(self, folder: Path, plan: ExportPlan) -> None:
        self._folder = folder
        self._slots = plan.slots
        self._files = {file.name: file for file in plan.files}
        self._left = {file.name: {slot.name for slot in file.slots} for file in plan.files}
        self._fds: dict[str, int] = {}
        self._num_unsynced = 0
        for file in plan.files:
            if not file.slots:
                self._open(file.name)
                self._complete(file.name)

    def spec_dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor is written in."""
        return self._slots[name].spec.dtype

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the values of one tensor, converted to the planned dtype.

        Raises:
            OSError: the disk is full, or broken.
        """
        slot = self._slots[name]
        assert name in self._left[slot.file], f"{name} is written twice"
        assert tuple(tensor.shape) == slot.spec.shape, (
            f"{name}: planned {slot.spec.shape}, got {tuple(tensor.shape)}"
        )
        fd = self._open(slot.file)
        self._write_all(fd, tensor_bytes(tensor.detach().to(slot.spec.dtype)), slot)
        self._left[slot.file].discard(name)
        if not self._left[slot.file]:
            self._complete(slot.file)

    def check_complete(self) -> None:
        """See that nothing is missing."""
        missing = sorted(name for names in self._left.values() for name in names)
        assert not missing, f"planned, but not written: {', '.join(missing[:5])}"

    def close(self) -> None:
        """Let go of all files."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _open(self, file: str) -> int:
        if file not in self._fds:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = self._fds[file] = os.open(self._folder / file, flags, 0o666)
            write_at(fd, memoryview(self._files[file].header), 0, self._folder / file)
        return self._fds[file]

    def _write_all(self, fd: int, data: memoryview, slot: Slot) -> None:
        path = self._folder / slot.file
        for begin in range(0, len(data), WRITE_BYTES):
            piece = data[begin : begin + WRITE_BYTES]
            write_at(fd, piece, slot.offset + begin, path)
            self._num_unsynced += len(piece)
            if self._num_unsynced >= SYNC_BYTES:
                self._sync(fd)

    def _sync(self, fd: int) -> None:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._num_unsynced = 0

    def _complete(self, file: str) -> None:
        fd = self._fds[file]
        os.fsync(fd)
        self._sync(fd)
        os.close(self._fds.pop(file))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The values of a tensor, in memory that it may share with the tensor."""
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def write_at(fd: int, data: memoryview, offset: int, path: Path) -> None:
    """Write all bytes; an error names the file."""
    written = 0
    while written < len(data):
        try:
            count = os.pwrite(fd, data[written:], offset + written)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        if count == 0:
            raise OSError(errno.EIO, "nothing could be written", str(path))
        written += count


def verify_files(folder: Path, plan: ExportPlan) -> None:
    """Open all files as any reader does, and compare names, dtypes and shapes with the plan.

    Raises:
        ExportFailed: something differs.
    """
    for file in plan.files:
        problem = find_problem(folder / file.name, file)
        if problem is not None:
            raise ExportFailed(f"{folder / file.name} is not what was planned: {problem}")


def find_problem(path: Path, file: FilePlan) -> str | None:
    """What is wrong with a file; None if nothing is."""
    if path.stat().st_size != file.num_bytes:
        return f"it has {path.stat().st_size} bytes, expected {file.num_bytes}"
    try:
        with safe_open(path, framework="pt") as reader:
            found = {
                name: (
                    reader.get_slice(name).get_dtype(),
                    tuple(reader.get_slice(name).get_shape()),
                )
                for name in list(reader.keys())
            }
            metadata = reader.metadata()
    except SafetensorError as error:
        return f"safetensors cannot read it: {error}"
    expected = {slot.name: (DTYPE_NAMES[slot.spec.dtype], slot.spec.shape) for slot in file.slots}
    if found != expected or metadata != METADATA:
        differing = [name for name in {*found, *expected} if found.get(name) != expected.get(name)]
        return f"metadata {metadata}, and differences in {sorted(differing)[:5]}"
    return None
