"""Backstay inside stock `torch.distributed.checkpoint`: a storage writer and a storage reader for `dcp.save`, `async_save` and `load`."""

from backstay.interop.dcp_reader import BackstayReader
from backstay.interop.dcp_writer import BackstayWriter

__all__ = ["BackstayReader", "BackstayWriter"]
