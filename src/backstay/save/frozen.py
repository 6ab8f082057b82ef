"""The file of parameters that nothing trains: written once, then hard-linked into each later checkpoint while they stay as they are."""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from backstay.save.stage import version_of
from backstay.state import local_tensor


@dataclass(frozen=True)
class Mark:
    """A tensor at one moment: the object, where its memory was, and how often it had been changed."""

    tensor: "weakref.ref[Tensor]"
    address: int
    version: int

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` is that one, unchanged."""
        local = local_tensor(tensor)
        is_same = self.tensor() is tensor and local.data_ptr() == self.address
        return is_same and version_of(local) == self.version


def mark(tensor: Tensor) -> Mark:
    """The mark of a tensor as it is now."""
    local = local_tensor(tensor)
    return Mark(weakref.ref(tensor), local.data_ptr(), version_of(local))


class FrozenFile:
    """Where this rank's frozen file lies, as long as it is known to hold the live values."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._home: str | None = None

    def find(self, tensors: Iterable[Tensor]) -> str | None:
        """Path below the root of a committed file with exactly these values; None if it has to be written."""
        tensors = list(tensors)
        if self._home is None or len(tensors) != len(self._marks):
            return None
        is_same = all(mark.fits(each) for mark, each in zip(self._marks, tensors, strict=True))
        return self._home if is_same else None

    def settle(self, home: str, marks: list[Mark]) -> None:
        """The file at `home` is committed; it holds what the marked tensors held, or none: what it was linked to holds."""
        if marks or self._home is not None:
            # Always the newest: older checkpoints are pruned.
            self._home, self._marks = home, marks or self._marks

    def forget(self) -> None:
        """Nothing is known of any file any more: the next save writes one."""
        self._home, self._marks = None, []
