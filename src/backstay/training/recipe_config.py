"""RecipeConfig: the settings that every recipe has."""

from dataclasses import dataclass, field
from typing import Literal

from backstay.errors import ConfigError
from backstay.training.batches import DataConfig
from backstay.training.config import MISSING, check_counts, fixed
from backstay.training.exports import ExportConfig
from backstay.training.lora import LoraConfig
from backstay.training.metrics import LogConfig
from backstay.training.model import ModelConfig
from backstay.training.optim import OptimizerConfig
from backstay.training.parallel import ParallelConfig
from backstay.training.qat import QatConfig
from backstay.training.resume import AUTO


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and which stay."""

    every_steps: int | None = 100
    every_s: float | None = None
    keep_last: int | None = 2
    # keep the so many with the lowest eval_loss, too
    keep_best: int | None = None
    # "sync" waits until each save is on disk
    mode: Literal["async", "sync"] = "async"
    staging: Literal["overlap", "block"] = "overlap"
    # limit for each rank's writer; 0 is none
    bandwidth_bytes_per_s: int = 0

    def __post_init__(self) -> None:
        check_counts("checkpoint", self, "every_steps", "keep_last", "keep_best")
        if self.every_s is not None and not self.every_s > 0:
            raise ConfigError(f"checkpoint.every_s={self.every_s}: expected null or seconds > 0")
        if self.bandwidth_bytes_per_s < 0:
            raise ConfigError(
                f"checkpoint.bandwidth_bytes_per_s={self.bandwidth_bytes_per_s}: expected a number >= 0"
            )


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When the loss on `data.eval` is measured; always at the end."""

    every_steps: int | None = None
    at_start: bool = False

    def __post_init__(self) -> None:
        check_counts("eval", self, "every_steps")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """Abstract: each recipe has its own, with these and further settings."""

    # directory for checkpoints/, metrics.jsonl, config.yaml and export/
    out: str = MISSING
    seed: int = fixed(0)
    # auto: go on from the newest checkpoint in `out`; never: refuse if there is one; or the path of a checkpoint
    resume: str = AUTO
    # resume although model, data or seed have changed
    allow_changes: bool = False
    # same bits on every run, on GPUs too; slower there
    deterministic: bool = False
    epochs: int = 1
    # stop after so many updates
    max_steps: int | None = None
    # samples (packed: sequences) per update, over all ranks
    batch_size: int = 8
    # of them per rank and forward pass
    micro_batch_size: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(train=()))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    qat: QatConfig = field(default_factory=QatConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.epochs < 1 or (self.max_steps is not None and self.max_steps < 1):
            raise ConfigError(
                f"expected epochs >= 1 and max_steps >= 1 or null; found {self.epochs} and {self.max_steps}"
            )
        if not self.out:
            raise ConfigError("out: expected a directory, found an empty text")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: expected a number from 0 to 2**63 - 1")
        if self.checkpoint.keep_best is not None and not self.data.eval:
            raise ConfigError(
                "checkpoint.keep_best goes by the loss on held-out data: set data.eval, too"
            )
        if self.lora.is_on and self.export.every_steps is not None:
            raise ConfigError(
                "export.every_steps: checkpoints of adapters hold no whole model to export; leave it out, or train without lora.rank"
            )
