"""ExportOptions: in which dtype and in how large files an export is written."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from backstay.errors import InvalidArgument

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How an export is written.

    Attributes:
        dtype: "same", or what all floating tensors are converted to: "float32", "bfloat16" or "float16". Others stay as they are.
        keep_dtype: patterns (`*`, `?`, `[]`) of names of tensors that keep their dtype.
        max_shard_bytes: of the tensors in one file; a tensor that is larger gets a file of its own.

    Raises:
        InvalidArgument: a value cannot be used.
    """

    dtype: str = "same"
    keep_dtype: tuple[str, ...] = ()
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        if self.dtype != "same" and self.dtype not in DTYPES:
            expected = ", ".join(map(repr, ("same", *DTYPES)))
            raise InvalidArgument(
                f"ExportOptions(dtype={self.dtype!r}): expected one of {expected}"
            )
        if isinstance(self.keep_dtype, str) or not all(
            isinstance(pattern, str) and pattern for pattern in self.keep_dtype
        ):
            raise InvalidArgument(
                f"ExportOptions(keep_dtype={self.keep_dtype!r}): expected a tuple of patterns, such as ('*.norm.weight',)"
            )
        size = self.max_shard_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidArgument(
                f"ExportOptions(max_shard_bytes={size!r}): expected a number of bytes >= 1"
            )
        object.__setattr__(self, "keep_dtype", tuple(self.keep_dtype))

    def dtype_of(self, dtype: torch.dtype, names: Iterable[str]) -> torch.dtype:
        """What a tensor of a dtype is written as.

        Args:
            names: that it has, here and in the export; one that matches is enough to keep its dtype.
        """
        if self.dtype == "same" or not dtype.is_floating_point:
            return dtype
        if any(fnmatchcase(name, pattern) for name in names for pattern in self.keep_dtype):
            return dtype
        return DTYPES[self.dtype]
