"""Knowledge distillation: a student learns what a larger teacher would say, token by token, beside the data itself.

    backstay train kd --nproc 2 model.path=STUDENT teacher.path=TEACHER data.train=chats.jsonl out=runs/student

The teacher is any model with the student's vocabulary: frozen, sharded like the student, and in no checkpoint.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from backstay.errors import ConfigError
from backstay.training.batches import MicroBatch
from backstay.training.course import Course
from backstay.training.distill import DistillConfig, check_same_vocabulary, distill_sums
from backstay.training.job import Helper, Job, Method, freeze_beside
from backstay.training.losses import compute_logits
from backstay.training.model import ModelConfig, ModelFiles
from backstay.training.prepare import prepare_files
from backstay.training.program import run_method
from backstay.training.recipe_config import RecipeConfig
from backstay.training.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class KdConfig(RecipeConfig):
    """Distillation of a teacher into a student, which is `model`."""

    teacher: ModelConfig = field(default_factory=ModelConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher.path is None and not self.teacher.config:
            raise ConfigError("teacher.path: expected the directory of the model to learn from")


def make_teacher(config: KdConfig, files: ModelFiles, run: Runtime) -> Helper:
    """The frozen teacher."""
    theirs = prepare_files(config.teacher, config.data.pad_token, Path(config.out), run)
    run.together(lambda: check_same_vocabulary(files, theirs))
    return freeze_beside("teacher", config, theirs, config.teacher, run)


def score(job: Job, batch: MicroBatch) -> dict[str, Tensor]:
    """Sums over the tokens to be learnt: the mixed loss, and the two that it is mixed from."""
    assert job.helper is not None, "there is a teacher"
    with torch.no_grad():
        taught = compute_logits(job.helper, batch.ids, batch.positions, kept=batch.kept)
    logits = compute_logits(job.model, batch.ids, batch.positions, kept=batch.kept)
    return distill_sums(logits, taught, batch.targets, job.config.distill)


def update_until_done(course: Course) -> None:
    """The loop: update, evaluate, log, save, until there is nothing left or a signal says stop."""
    while (micro_batches := course.next_batches()) is not None:
        means = course.accumulate(micro_batches)
        if means is None:
            break
        grad_norm = course.update(means["loss"])
        scores = {**means, **course.evaluate_if_due()}
        course.log(micro_batches, scores, grad_norm)
        course.save_if_due(scores)


METHOD = Method(schema=KdConfig, loop=update_until_done, score=score, make_helper=make_teacher)

if __name__ == "__main__":
    sys.exit(run_method(METHOD))
