"""Backstay: asynchronous distributed checkpoints for PyTorch.

Names are imported on first use, so that tools which only look at checkpoints, and the writer
process, never load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backstay.catalog import Catalog as Catalog
    from backstay.policies import RetentionPolicy as RetentionPolicy
    from backstay.policies import SavePolicy as SavePolicy

__version__ = "0.1.0"

_HOME = {
    "Catalog": "backstay.catalog",
    "RetentionPolicy": "backstay.policies",
    "SavePolicy": "backstay.policies",
}
__all__ = ["Catalog", "RetentionPolicy", "SavePolicy"]  # noqa: F822, RUF100


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'backstay' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
