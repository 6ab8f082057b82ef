"""Losses of distillation, as sums over tokens: whoever knows the number of tokens of all ranks divides.

Pure: logits of student and teacher in, sums out; and the check that both mean the same by a token.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backstay.errors import ConfigError, ModelError
from backstay.training.batches import IGNORED
from backstay.training.model import ModelFiles

# Stands for log(0), so that a token which neither model can say adds 0 instead of 0 x infinity.
LOG_ZERO = -1e30


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """How a student is compared with its teacher.

    Raises:
        ConfigError: a value cannot be used.
    """

    # forward_kl covers all that the teacher might say, reverse_kl what it prefers, js is between them
    divergence: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl"
    # flattens both distributions before they are compared
    temperature: float = 1.0
    # part of the divergence in the loss; the rest is the cross-entropy of the data
    mix: float = 0.5
    # tokens that are compared at a time: fewer need less memory
    chunk_tokens: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}: expected a number > 0")
        if not 0 <= self.mix <= 1:
            raise ConfigError(f"mix={self.mix}: expected a number from 0 to 1")
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens}: expected a number >= 1")


def distill_sums(
    student_logits: Tensor, teacher_logits: Tensor, targets: Tensor, config: DistillConfig
) -> dict[str, Tensor]:
    """Loss of a student beside its teacher, summed over all targets, in float32.

    loss = mix T^2 D + (1 - mix) cross-entropy, with the distributions p of the teacher and q of the student at temperature T, where D is
    forward_kl: KL(p || q) (Hinton et al. 2015, whose factor T^2 keeps gradients as large as at T = 1);
    reverse_kl: KL(q || p); js: KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2 (both as in GKD, Agarwal et al. 2023, there without T^2).
    The cross-entropy is at T = 1. Logits are taken to float32 by chunks, forward and backward, and never kept so.

    Args:
        student_logits: (rows, kept, vocabulary), of any floating dtype; the gradient goes here.
        teacher_logits: the same shape; it gets no gradient.
        targets: (rows, kept); nothing is learnt where it is `IGNORED`.

    Returns:
        "loss", which alone has a gradient; "divergence", with its factor T^2; "cross_entropy".
    """
    assert student_logits.shape == teacher_logits.shape, "check_same_vocabulary comes first"
    # The gradient of a split is put together once, that of slices once per slice.
    pieces = zip(
        student_logits.flatten(0, 1).split(config.chunk_tokens),
        teacher_logits.detach().flatten(0, 1).split(config.chunk_tokens),
        targets.flatten().split(config.chunk_tokens),
        strict=True,
    )
    sums = [
        checkpoint(chunk_sums, *piece, config, use_reentrant=False, preserve_rng_state=False)
        for piece in pieces
    ]
    divergence, cross_entropy = torch.stack(sums).sum(0).unbind()
    return {
        "loss": config.mix * divergence + (1 - config.mix) * cross_entropy,
        "divergence": divergence.detach(),
        "cross_entropy": cross_entropy.detach(),
    }


def chunk_sums(student: Tensor, teacher: Tensor, targets: Tensor, config: DistillConfig) -> Tensor:
    """Divergence and cross-entropy, (2,), of a few tokens."""
    is_target = targets != IGNORED
    # A chunk without targets gives sums of nothing: 0, and gradients of 0.
    student, teacher = student[is_target].float(), teacher[is_target].float()
    divergence = diverge(
        log_softmax(student / config.temperature),
        log_softmax(teacher / config.temperature),
        config.divergence,
    )
    cross_entropy = F.cross_entropy(student, targets[is_target], reduction="sum")
    return torch.stack([config.temperature**2 * divergence, cross_entropy])


def log_softmax(logits: Tensor) -> Tensor:
    """Logarithms of probabilities, all of them finite."""
    return F.log_softmax(logits, -1).clamp_min(LOG_ZERO)


def diverge(student: Tensor, teacher: Tensor, divergence: str) -> Tensor:
    """Sum of the divergence of log-probabilities (tokens, vocabulary)."""
    if divergence == "forward_kl":
        return kl(teacher, student)
    if divergence == "reverse_kl":
        return kl(student, teacher)
    middle = torch.logaddexp(student, teacher) - math.log(2)
    return (kl(teacher, middle) + kl(student, middle)) / 2


def kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one || other), summed, of log-probabilities."""
    return (one.exp() * (one - other)).sum()


def check_same_vocabulary(student: ModelFiles, teacher: ModelFiles) -> None:
    """See that both models mean the same token by every id, and have as many rows.

    Raises:
        ModelError: they do not; names the sizes, or the first token that differs.
    """
    names = [str(files.weights or files.tokenizer.name_or_path) for files in (student, teacher)]
    way_out = "choose a teacher with the student's tokenizer"
    tokens = [token_of_id(files) for files in (student, teacher)]
    for number in sorted(tokens[0].keys() | tokens[1].keys()):
        found = [each.get(number) for each in tokens]
        if found[0] != found[1]:
            raise ModelError(
                f"token {number} is {found[0]!r} for the student ({names[0]}, {len(tokens[0])} tokens), "
                f"but {found[1]!r} for the teacher ({names[1]}, {len(tokens[1])} tokens); {way_out}"
            )
    rows = [files.config.get_text_config().vocab_size for files in (student, teacher)]
    if rows[0] != rows[1]:
        raise ModelError(
            f"vocab_size is {rows[0]} for the student ({names[0]}), but {rows[1]} for the teacher ({names[1]}), "
            f"so their logits cannot be compared; {way_out} and as many rows"
        )


def token_of_id(files: ModelFiles) -> dict[int, str]:
    """The vocabulary of a tokenizer, added tokens included."""
    return {number: token for token, number in files.tokenizer.get_vocab().items()}
