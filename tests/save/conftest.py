"""Fixtures that play trainers; every writer is closed at the end of its test."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_trainer import FakeTrainer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def make_trainer(root: Path) -> Iterator[Callable[..., FakeTrainer]]:
    trainers = []

    def make(**options: object) -> FakeTrainer:
        trainers.append(FakeTrainer(root, **options))  # type: ignore[arg-type]
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.writer.close(timeout_s=2.0)


@pytest.fixture
def trainer(make_trainer: Callable[..., FakeTrainer]) -> FakeTrainer:
    return make_trainer()


@pytest.fixture
def num_fds() -> Callable[[], int]:
    return lambda: len(os.listdir("/proc/self/fd"))
