"""Exports of a run: Hugging Face directories below `<out>/export`, at their own cadence while training goes on, and one at the end."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn
from transformers import AutoModelForCausalLM

from backstay.attempts import parse_step, step_dir_name
from backstay.coordination import Coordination
from backstay.errors import ExportFailed
from backstay.events import SaveEvent
from backstay.interop.hf import Exporter, ExportOptions, export_model
from backstay.interop.quantized import quantized_state, write_quantized
from backstay.training.config import check_counts
from backstay.training.qat import QatConfig, linear_layers

log = logging.getLogger("backstay")
FINAL = "final"
MEETING_S, POLL_S = 20.0, 0.1


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """When and how the model is written for others."""

    # also while training, from the checkpoint of each step divisible by it, by a background process
    every_steps: int | None = None
    # at the end, with a link `final` to it
    at_end: bool = True
    # of adapters at the end: also the whole model with them merged into a copy of the base
    merged: bool = False
    # of finished exports the newest so many stay; null keeps all
    keep_last: int | None = None
    # of floating tensors; "same" is that of the trained weights
    dtype: Literal["same", "float32", "bfloat16", "float16"] = "same"
    # names of tensors that keep their dtype; may hold *
    keep_dtype: tuple[str, ...] = ()
    max_shard_bytes: int = 5_000_000_000

    def __post_init__(self) -> None:
        check_counts("export", self, "every_steps", "keep_last", "max_shard_bytes")

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
            prune_exports(exporter.out_root, config.keep_last)

    return on_event


def wait_for_exports(exporter: Exporter, ranks: Coordination) -> None:
    """Wait, on all ranks, until rank 0's exporter has done everything; they meet in between, so that no time limit of theirs is passed.

    Raises:
        RankFailed, ExportFailed: some export failed.
    """
    while True:
        patience = time.monotonic() + MEETING_S
        while ranks.rank == 0 and not exporter.is_idle and time.monotonic() < patience:
            time.sleep(POLL_S)
        if ranks.announce(int(exporter.is_idle)):
            break
    error = None
    try:
        exporter.wait()
    except ExportFailed as caught:
        error = caught
    ranks.raise_together(error)


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
            prune_exports(home, config.keep_last)
        except OSError as caught:
            error = caught
    ranks.raise_together(error)
    return path


def export_quantized(source: Path, out: Path, *, qat: QatConfig, companions: Path) -> None:
    """Quantise a finished export as training assumed; by one process, which holds the whole model.

    Raises:
        InvalidArgument: `out` exists.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    quantized = {name for name, _ in linear_layers(model)}
    skipped = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name not in quantized
    ]
    out.parent.mkdir(exist_ok=True)
    scheme = qat.for_torchao()
    tensors = quantized_state(model, scheme, skipped)
    write_quantized(out, tensors, scheme=scheme, companions=companions, skipped=skipped)


def prune_exports(home: Path, keep_last: int | None) -> None:
    """Remove all finished exports but the newest few; what is no export of ours stays, and so does what `final` leads to."""
    if keep_last is None:
        return
    final = os.readlink(home / FINAL) if (home / FINAL).is_symlink() else None
    steps = {path: parse_step(path.name) for path in home.glob("step-*") if path.name != final}
    ours = sorted(path for path, step in steps.items() if step is not None)
    num_kept = keep_last - (final is not None)
    for path in ours[: max(len(ours) - num_kept, 0)]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warning("the export %s cannot be removed: %s", path, error)


def point(link: Path, target: str) -> None:
    """Let a link lead somewhere, in one step."""
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    os.symlink(target, fresh)
    os.replace(fresh, link)
