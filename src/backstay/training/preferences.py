"""Losses of preference optimisation, as sums over pairs: whoever knows the number of pairs of all ranks divides.

Pure: log-probabilities of two models in, sums out. The rows of a batch of pairs are all chosen answers, then all rejected ones.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backstay.errors import ConfigError
from backstay.training.batches import IGNORED


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """What is learnt from a pair of answers.

    Raises:
        ConfigError: a value cannot be used, or two of them do not go together.
    """

    # how much a difference from the reference model counts
    beta: float = 0.1
    # sigmoid is DPO
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    # of the pairs, the part that is supposed to be the wrong way round (sigmoid only)
    label_smoothing: float = 0.0
    # average the log-probabilities over an answer's tokens, as ipo always does
    length_normalized: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"beta={self.beta}: expected a number > 0, for example 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing}: expected 0 <= label_smoothing < 0.5, because from 0.5 on the rejected answers would be learnt"
            )
        if self.label_smoothing and self.loss == "ipo":
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} is for loss=sigmoid only; expected 0 with loss=ipo"
            )

    @property
    def averages(self) -> bool:
        """Whether log-probabilities are per token rather than per answer."""
        return self.length_normalized or self.loss == "ipo"


def sequence_logprobs(logits: Tensor, targets: Tensor, *, chunk_tokens: int = 1024) -> Tensor:
    """Log-probability of each row's targets, summed.

    The logits are taken to float32 a few places at a time, forward and backward, and never kept so.

    Args:
        logits: (rows, kept, vocabulary), of any floating dtype.
        targets: (rows, kept); `IGNORED` where nothing was to be said.
        chunk_tokens: places, over all rows, that are computed at a time.

    Returns:
        (rows,) in float32; 0 for a row without targets.
    """
    # The gradient of a split is put together once, that of slices once per slice.
    pieces = zip(
        logits.flatten(0, 1).split(chunk_tokens), targets.flatten().split(chunk_tokens), strict=True
    )
    losses = [
        checkpoint(token_losses, *piece, use_reentrant=False, preserve_rng_state=False)
        for piece in pieces
    ]
    return -torch.cat(losses).view(targets.shape).sum(1)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy at each place, 0 where there is no target."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")


def count_targets(targets: Tensor) -> Tensor:
    """Number of targets of each row: the lengths of the answers."""
    return (targets != IGNORED).sum(1)


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    config: PreferenceConfig,
    *,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Loss and rewards of pairs of answers, summed over the pairs, in float32.

    With the difference d of the two answers' log-ratios log(policy / reference) and smoothing e:
    sigmoid: -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), DPO (Rafailov et al. 2023) and its conservative form (Mitchell 2023);
    ipo: (d - 1 / (2 beta))^2 with log-ratios per token (Azar et al. 2023; averaged as in TRL).

    Args:
        chosen, rejected: (pairs,) summed log-probabilities under the model that learns, see `sequence_logprobs`.
        ref_chosen, ref_rejected: (pairs,) the same under the reference model.
        chosen_lengths, rejected_lengths: (pairs,) numbers of targets; needed if `config.averages`, and not used otherwise.
        weights: (pairs,) 0 for what only fills up a batch, else 1.

    Returns:
        "loss", which alone has a gradient; "chosen_reward" and "rejected_reward", beta times the log-ratios that the loss was made from;
        "margin", their difference; "accuracy", how many chosen answers have the higher reward.
    """
    chosen_ratio = log_ratio(chosen, ref_chosen, chosen_lengths, averages=config.averages)
    rejected_ratio = log_ratio(rejected, ref_rejected, rejected_lengths, averages=config.averages)
    losses = pair_losses(chosen_ratio - rejected_ratio, config)
    chosen_reward = config.beta * chosen_ratio.detach()
    rejected_reward = config.beta * rejected_ratio.detach()
    each = {
        "loss": losses,
        "accuracy": (chosen_reward > rejected_reward).float(),
        "margin": chosen_reward - rejected_reward,
        "chosen_reward": chosen_reward,
        "rejected_reward": rejected_reward,
    }
    counted = torch.ones_like(losses) if weights is None else weights.float()
    return {name: (values * counted).sum() for name, values in each.items()}


def log_ratio(
    policy: Tensor, reference: Tensor, lengths: Tensor | None, *, averages: bool
) -> Tensor:
    """How much likelier an answer has become, as a logarithm; per token if `averages`."""
    ratio = policy.float() - reference.float()
    if not averages:
        return ratio
    assert lengths is not None, "an average needs the number of tokens of each answer"
    return ratio / lengths.clamp_min(1)


def pair_losses(difference: Tensor, config: PreferenceConfig) -> Tensor:
    """The loss of each pair, from the difference of its log-ratios."""
    if config.loss == "ipo":
        return (difference - 1 / (2 * config.beta)) ** 2
    scaled, smoothing = config.beta * difference, config.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)
