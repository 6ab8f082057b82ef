"""Metrics: one line per logged step in `metrics.jsonl`, a progress bar or plain lines, and TensorBoard or Weights & Biases if wanted.

Runs in: rank 0; on other ranks every call does nothing. Lines are only ever added: a resumed run repeats the steps that were lost, under the next `attempt`.
"""

import logging
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from backstay.errors import ConfigError
from backstay.events import append_line, read_lines
from backstay.training.config import check_counts

log = logging.getLogger("backstay")
METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is written down."""

    every_steps: int = 1
    # the samples of each update, as numbers, to audit the order of the data
    samples: bool = False
    tensorboard: bool = False
    # name of a Weights & Biases project
    wandb_project: str | None = None

    def __post_init__(self) -> None:
        check_counts("log", self, "every_steps")


class Metrics:
    """Writes down how a run goes.

    Args:
        out: the run's directory.
        is_active: whether this rank writes.

    Raises:
        ConfigError: a package that the configuration asks for is not installed.
    """

    def __init__(self, out: Path, config: LogConfig, *, is_active: bool) -> None:
        self.path = out / METRICS_NAME
        self.attempt = 0
        self._config = config
        self._is_active = is_active
        self._bar: Any = None
        self._sinks: list[Any] = []
        if is_active:
            self.attempt = 1 + max(
                (line.get("attempt", 0) for line in read_lines(self.path)), default=0
            )
            self._sinks = open_sinks(out, config)

    def begin(self, step: int, num_steps: int) -> None:
        """Show progress from here on."""
        if self._is_active and sys.stderr.isatty():
            self._bar = tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the values of a step."""
        if not self._is_active or step % self._config.every_steps:
            return
        fields = {name: value for name, value in values.items() if value is not None}
        append_line(self.path, {"step": step, "attempt": self.attempt, **fields})
        numbers = {name: value for name, value in fields.items() if isinstance(value, int | float)}
        for sink in self._sinks:
            sink(step, numbers)
        self._show(step, numbers)

    def say(self, text: str) -> None:
        """A line for the user, above the progress bar."""
        if not self._is_active:
            return
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """End the display."""
        if self._bar is not None:
            self._bar.close()
        for sink in self._sinks:
            sink.close()

    def _show(self, step: int, numbers: Mapping[str, float]) -> None:
        text = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if name in SHOWN)
        if self._bar is None:
            print(f"step {step}: {text}", flush=True)
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)


SHOWN = ("loss", "eval_loss", "lr", "tokens_per_s", "grad_norm", "checkpoint_ms")


class Clock:
    """Tokens per second between two readings."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self._tokens = 0

    def count(self, num_tokens: int) -> None:
        """Note tokens that were processed."""
        self._tokens += num_tokens

    def read(self) -> tuple[float, float]:
        """Tokens per second and seconds since the last reading."""
        now = time.perf_counter()
        elapsed_s, tokens = now - self._at, self._tokens
        self._at, self._tokens = now, 0
        return tokens / elapsed_s, elapsed_s


def memory_gb(device: torch.device) -> float:
    """The most memory used so far, in GB: of the GPU if there is one, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class TensorBoard:
    """Writes numbers as TensorBoard events."""

    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out / "tensorboard"))

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """Writes numbers to Weights & Biases; a resumed run goes on under the same id."""

    def __init__(self, out: Path, project: str) -> None:
        import wandb

        name = out.absolute().name
        self._run = wandb.init(project=project, name=name, id=name, dir=str(out), resume="allow")

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def open_sinks(out: Path, config: LogConfig) -> list[Any]:
    """The optional receivers of metrics."""
    sinks: list[Any] = []
    try:
        if config.tensorboard:
            sinks.append(TensorBoard(out))
        if config.wandb_project:
            sinks.append(WeightsAndBiases(out, config.wandb_project))
    except ImportError as error:
        package = "tensorboard" if config.tensorboard and not sinks else "wandb"
        raise ConfigError(f"log: {package} is not installed; pip install {package}") from error
    return sinks
