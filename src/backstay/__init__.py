"""Backstay: asynchronous distributed checkpoints for PyTorch.

Names are imported on first use, so that tools which only look at checkpoints, and the writer
process, never load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backstay.catalog import Catalog as Catalog
    from backstay.checkpointer import Checkpointer as Checkpointer
    from backstay.events import SaveEvent as SaveEvent
    from backstay.load.restore import restore as restore
    from backstay.policies import RetentionPolicy as RetentionPolicy
    from backstay.policies import SavePolicy as SavePolicy
    from backstay.save.assembled import Assembled as Assembled
    from backstay.save.pending import PendingCheckpoint as PendingCheckpoint
    from backstay.state import PerRank as PerRank
    from backstay.state import TrainState as TrainState

__version__ = "0.1.0"

_HOME = {
    "Assembled": "backstay.save.assembled",
    "Catalog": "backstay.catalog",
    "Checkpointer": "backstay.checkpointer",
    "PendingCheckpoint": "backstay.save.pending",
    "PerRank": "backstay.state",
    "RetentionPolicy": "backstay.policies",
    "SaveEvent": "backstay.events",
    "SavePolicy": "backstay.policies",
    "TrainState": "backstay.state",
    "restore": "backstay.load.restore",
}
__all__ = [  # noqa: F822, RUF100
    "Assembled",
    "Catalog",
    "Checkpointer",
    "PendingCheckpoint",
    "PerRank",
    "RetentionPolicy",
    "SaveEvent",
    "SavePolicy",
    "TrainState",
    "restore",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'backstay' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
