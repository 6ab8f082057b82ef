"""Fresh memory for what is about to be read: large host tensors in huge pages, because the first touch of small ones costs more than the read."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

MADV_HUGEPAGE = 14
PAGE_BYTES = 4096
# Below this a tensor has hardly a huge page (2 MiB) to itself.
LARGE_BYTES = 4 << 20


def empty_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """An uninitialised tensor; the kernel's refusal of huge pages is no error."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    if tensor.is_cpu and tensor.nbytes >= LARGE_BYTES:
        start = -(-tensor.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        end = (tensor.data_ptr() + tensor.nbytes) // PAGE_BYTES * PAGE_BYTES
        _libc().madvise(start, end - start, MADV_HUGEPAGE)
    return tensor


@lru_cache(maxsize=1)
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
