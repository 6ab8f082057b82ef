"""Exports of a run: Hugging Face directories below `<out>/export`, at their own cadence while training goes on, and one at the end."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from backstay.attempts import step_dir_name
from backstay.coordination import Coordination
from backstay.errors import ConfigError
from backstay.events import SaveEvent
from backstay.interop.hf import Exporter, ExportOptions, export_model

FINAL = "final"


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """When and how the model is written for others."""

    # also while training, from the checkpoint of each step divisible by it, by a background process
    every_steps: int | None = None
    # at the end, with a link `final` to it
    at_end: bool = True
    # of floating tensors; "same" is that of the trained weights
    dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    # names of tensors that keep their dtype; may hold *
    keep_dtype: tuple[str, ...] = ()
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(
                f"export.every_steps={self.every_steps}: expected null or a number >= 1"
            )

    def options(self) -> ExportOptions:
        """As the exporting functions take them."""
        return ExportOptions(
            dtype=self.dtype, keep_dtype=self.keep_dtype, max_shard_bytes=self.max_shard_bytes
        )

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of a step is to be exported."""
        return self.every_steps is not None and step % self.every_steps == 0


def export_when_committed(
    exporter: Exporter, config: ExportConfig, checkpoints: Path
) -> Callable[[SaveEvent], None]:
    """A callback for `Checkpointer(on_event=...)` on rank 0."""

    def on_event(event: SaveEvent) -> None:
        if event.outcome == "committed" and config.is_due(event.step):
            exporter.start(checkpoints / step_dir_name(event.step), event.step)

    return on_event


def export_at_end(
    model: nn.Module,
    home: Path,
    step: int,
    *,
    companions: Path,
    config: ExportConfig,
    ranks: Coordination,
) -> Path:
    """Export the live model as `<home>/step-...`, unless that is there, and let `<home>/final` lead to it; on all ranks."""
    path = home / step_dir_name(step)
    is_there = ranks.announce(int(path.exists()))
    if not is_there:
        export_model(model, path, companions=companions, options=config.options(), ranks=ranks)
    error = None
    if ranks.rank == 0:
        try:
            point(home / FINAL, path.name)
        except OSError as caught:
            error = caught
    ranks.raise_together(error)
    return path


def point(link: Path, target: str) -> None:
    """Let a link lead somewhere, in one step."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    os.symlink(target, fresh)
    os.replace(fresh, link)
