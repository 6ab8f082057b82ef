"""The optimizer and its learning rate: a function of the step, so that nothing about it can be restored wrongly."""

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from backstay.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, clipping, and the schedule of the learning rate."""

    lr: float = 2e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    # not applied to biases and norms
    weight_decay: float = 0.0
    # steps of linear warm-up
    warmup_steps: int = 0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    # the rate at the end, as a part of lr
    final_ratio: float = 0.1
    # largest norm of all gradients; 0 does not clip
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"optimizer.lr={self.lr}: expected a number > 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"optimizer.betas={list(self.betas)}: expected two numbers >= 0 and < 1"
            )
        for name in ("eps", "weight_decay", "warmup_steps", "clip_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"optimizer.{name}={getattr(self, name)}: expected a number >= 0")
        if not 0 <= self.final_ratio <= 1:
            raise ConfigError(
                f"optimizer.final_ratio={self.final_ratio}: expected a number from 0 to 1"
            )


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over all trainable parameters; vectors (biases, norms) are not decayed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def rate_at(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of update number `step` (the first is 1) of `num_steps`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1)
    progress = min(progress, 1.0)
    shape = (
        1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    )
    return config.lr * (config.final_ratio + (1 - config.final_ratio) * shape)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Use a learning rate from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients down to a norm over all ranks; returns what the norm was.

    Args:
        max_norm: 0 only measures.
    """
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
