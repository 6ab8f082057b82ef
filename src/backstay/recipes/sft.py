"""Supervised fine-tuning: any Hugging Face causal LM on chats, or on prompts with completions.

    backstay train sft --nproc 2 model.path=DIR data.train=chats.jsonl out=runs/first
    torchrun --nproc-per-node 8 -m backstay.recipes.sft --config my.yaml optimizer.lr=1e-5

The same command again goes on from the newest checkpoint. Weights, optimizer, data position and random numbers come back bit for bit, so the
result is that of a run that was never interrupted.
"""

import sys
from dataclasses import dataclass

from torch import Tensor

from backstay.training.batches import MicroBatch
from backstay.training.course import Course
from backstay.training.job import Job, Method
from backstay.training.losses import token_loss
from backstay.training.program import run_method
from backstay.training.recipe_config import RecipeConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig(RecipeConfig):
    """Supervised fine-tuning of a causal LM."""


def score(job: Job, batch: MicroBatch) -> dict[str, Tensor]:
    """Sums over the tokens to be learnt."""
    return {"loss": token_loss(job.model, batch)}


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


METHOD = Method(schema=SftConfig, loop=update_until_done, score=score)

if __name__ == "__main__":
    sys.exit(run_method(METHOD))
