"""The file of parameters that nothing trains: written once, then hard-linked into each later checkpoint while its content is the same.

Decided by content, not by torch's version counters: those do not count everything (`torch._foreach_*` on sharded tensors, fused kernels).
"""

from collections.abc import Iterable

import xxhash
from torch import Tensor

from backstay.fingerprint import sum_tensor
from backstay.save.compare import bytes_view
from backstay.state import plain_tensors


def digest_frozen(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash over names and this rank's bytes; "" if there are none. Memory speed, and the interpreter is free meanwhile."""
    hasher = xxhash.xxh3_128()
    is_empty = True
    for name, tensor in tensors:
        is_empty = False
        for part in plain_tensors(tensor):
            hasher.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
            if part.is_cpu:
                hasher.update(bytes_view(part))
            else:
                # Read where it is: a device sums faster than its bytes could be fetched.
                hasher.update(sum_tensor(part).to_bytes(8, "little"))
    return "" if is_empty else hasher.hexdigest()


class FrozenFile:
    """Where this rank's frozen file lies, and what it holds."""

    def __init__(self) -> None:
        self._home: str | None = None
        self._digest = ""

    def find(self, digest: str) -> str | None:
        """Path below the root of a committed file with that content; None if it has to be written."""
        return self._home if digest and digest == self._digest else None

    def settle(self, home: str, digest: str) -> None:
        """The file at `home` is committed, the newest of its kind: older checkpoints are pruned."""
        self._home, self._digest = home, digest

    def forget(self) -> None:
        """Nothing is known of any file any more: the next save writes one."""
        self._home, self._digest = None, ""
