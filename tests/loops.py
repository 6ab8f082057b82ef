"""Training loops that several tests run in ranks: what a user would write, on the tiny models of `backstay.testing`."""

import os
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backstay import Checkpointer, RetentionPolicy, SavePolicy, TrainState
from backstay.testing.equality import state_bytes
from backstay.testing.models import Training, make_training, train_step

# Every dtype that DCP can hold.
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@dataclass
class Record:
    """What a loop did: all that an interruption must not change.

    Attributes:
        start: the step that `restore` gave.
        steps: per step: sampler position before it, learning rates, loss.
        draws: of the three generators, after the last step.
        state: of model and optimizer.
    """

    start: int = 0
    steps: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    draws: tuple[float, ...] = ()
    state: dict[str, str] = field(default_factory=dict)


def train_state(training: Training, **extra: Any) -> TrainState:
    """The train state of a tiny training."""
    return TrainState(
        model=training.model,
        optimizer=training.optimizer,
        lr_scheduler=training.lr_scheduler,
        sampler=training.sampler,
        extra=extra,
    )


def seed_all(seed: int) -> None:
    """Seed all generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def loop(
    rank: int,
    world_size: int,
    root: Path,
    kind: str,
    total: int,
    *,
    optimizer: str = "adamw",
    stop_at: int | None = None,
    staging: str = "overlap",
    every: int = 1,
) -> Record:
    """Train up to `total`, saving; a rank that comes to `stop_at` is killed as soon as its save is staged."""
    seed_all(100 + rank)
    training = make_training(kind, optimizer=optimizer)  # type: ignore[arg-type]
    record = Record()
    checkpointer = Checkpointer(
        root,
        train_state(training),
        save=SavePolicy(every_steps=every),
        keep=RetentionPolicy(last=3),
        staging=staging,  # type: ignore[arg-type]
    )
    with checkpointer:
        record.start = checkpointer.restore()
        for step in range(record.start + 1, total + 1):
            position = training.sampler.position
            train_step(training)
            record.steps[step] = (position, learning_rates(training), training.losses[-1])
            pending = checkpointer.maybe_save(step, metrics={"loss": training.losses[-1]})
            if step == stop_at and pending is not None:
                pending.staged.result(30)
                os.kill(os.getpid(), signal.SIGKILL)
    record.draws = (random.random(), float(np.random.rand()), float(torch.rand(())))
    record.state = state_bytes(training.model, training.optimizers)
    return record


def learning_rates(training: Training) -> list[float]:
    """Of all groups of all optimizers."""
    return [float(group["lr"]) for each in training.optimizers for group in each.param_groups]
