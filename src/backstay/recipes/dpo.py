"""Direct preference optimisation: make chosen answers likelier than rejected ones, measured from a reference model.

    backstay train full_dpo --nproc 2 model.path=DIR data.train=pairs.jsonl out=runs/aligned
    backstay train lora_dpo --nproc 2 model.path=DIR data.train=pairs.jsonl out=runs/aligned

The reference is the model that training starts from: a frozen copy of it, or, if adapters are trained, the model without them. It is sharded like
the trained model, and in no checkpoint.
"""

import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from backstay.errors import ConfigError
from backstay.training.batches import DataConfig
from backstay.training.course import Course
from backstay.training.job import Helper, Job, Method, freeze_beside, no_helper
from backstay.training.lora import without_adapters
from backstay.training.losses import compute_logits
from backstay.training.model import ModelFiles
from backstay.training.pairs import CollatePairs, PairBatch
from backstay.training.preferences import (
    PreferenceConfig,
    count_targets,
    preference_loss,
    sequence_logprobs,
)
from backstay.training.program import run_method
from backstay.training.recipe_config import RecipeConfig
from backstay.training.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class DpoConfig(RecipeConfig):
    """Preference optimisation of a causal LM; a batch is made of pairs."""

    data: DataConfig = field(default_factory=lambda: DataConfig(train=(), packing=False))
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data.packing:
            raise ConfigError("data.packing: pairs are not packed; set data.packing=false")


def make_reference(config: DpoConfig, files: ModelFiles, run: Runtime) -> Helper:
    """A frozen copy of the model that training starts from; with adapters there is no need of one."""
    if config.lora.is_on:
        return no_helper(config, files, run)
    return freeze_beside("reference", config, files, config.model, run)


def score(job: Job, batch: PairBatch) -> dict[str, Tensor]:
    """Sums over pairs: loss, rewards, and how often the chosen answer has the higher one."""
    lengths = count_targets(batch.targets)
    num_pairs = len(batch.weights)
    with torch.no_grad():
        if job.helper is None:
            with without_adapters(job.model):
                reference = answer_logprobs(job.model, batch)
        else:
            reference = answer_logprobs(job.helper, batch)
    policy = answer_logprobs(job.model, batch)
    chosen, rejected = policy.split(num_pairs)
    ref_chosen, ref_rejected = reference.split(num_pairs)
    return preference_loss(
        chosen,
        rejected,
        ref_chosen,
        ref_rejected,
        job.config.preference,
        chosen_lengths=lengths[:num_pairs],
        rejected_lengths=lengths[num_pairs:],
        weights=batch.weights,
    )


def answer_logprobs(model: nn.Module, batch: PairBatch) -> Tensor:
    """Log-probabilities of all answers, the chosen ones first."""
    logits = compute_logits(model, batch.ids, batch.positions, kept=batch.kept)
    return sequence_logprobs(logits, batch.targets)


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


METHOD = Method(
    schema=DpoConfig,
    loop=update_until_done,
    score=score,
    kind="pairs",
    collate=CollatePairs,
    make_helper=make_reference,
)

if __name__ == "__main__":
    sys.exit(run_method(METHOD))
