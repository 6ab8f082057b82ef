"""Losses of preferences and distillation against their formulas, written out with whole log-softmaxes; values and gradients."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from backstay.errors import ConfigError
from backstay.training.batches import IGNORED
from backstay.training.distill import DistillConfig, distill_sums
from backstay.training.preferences import (
    PreferenceConfig,
    count_targets,
    preference_loss,
    sequence_logprobs,
)

ROWS, KEPT, VOCABULARY, BETA = 6, 7, 11, 0.2


def draw(seed: int, dtype: torch.dtype = torch.float32, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(ROWS, KEPT, VOCABULARY, generator=generator)).to(dtype)


def draw_targets() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    targets = torch.randint(0, VOCABULARY, (ROWS, KEPT), generator=generator)
    targets[torch.rand(ROWS, KEPT, generator=generator) < 0.3] = IGNORED
    targets[2] = IGNORED  # a row that only fills up a batch
    return targets


def reference_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """TRL's: log_softmax, gather, mask, sum."""
    mask = targets != IGNORED
    found = logits.float().log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    return (found * mask).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 5, 1024])
def test_logprobs_of_answers(dtype: torch.dtype, chunk: int) -> None:
    targets = draw_targets()
    ours, theirs = (draw(1, dtype).requires_grad_() for _ in range(2))
    found, expected = (
        sequence_logprobs(ours, targets, chunk_tokens=chunk),
        reference_logprobs(theirs, targets),
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found[2] == 0
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"length_normalized": True},
    {"loss": "ipo"},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_preference_losses_are_the_published_ones(options: dict[str, Any]) -> None:
    config = PreferenceConfig(beta=BETA, **options)
    targets = draw_targets()
    lengths = count_targets(targets)
    weights = torch.tensor([1.0, 1.0, 0.0])
    ours, theirs = (draw(2).requires_grad_() for _ in range(2))
    reference = draw(3)
    chosen, rejected = sequence_logprobs(ours, targets).split(3)
    ref_chosen, ref_rejected = sequence_logprobs(reference, targets).split(3)
    found = preference_loss(
        chosen,
        rejected,
        ref_chosen,
        ref_rejected,
        config,
        chosen_lengths=lengths[:3],
        rejected_lengths=lengths[3:],
        weights=weights,
    )
    policy, base = reference_logprobs(theirs, targets), reference_logprobs(reference, targets)
    if config.loss == "ipo" or config.length_normalized:
        policy, base = policy / lengths.clamp_min(1), base / lengths.clamp_min(1)
    difference = (policy[:3] - base[:3]) - (policy[3:] - base[3:])
    if config.loss == "ipo":
        each = (difference - 1 / (2 * BETA)) ** 2
    else:
        smooth = config.label_smoothing
        each = -(1 - smooth) * torch.log(torch.sigmoid(BETA * difference)) - smooth * torch.log(
            torch.sigmoid(-BETA * difference)
        )
    expected = (each * weights).sum()
    torch.testing.assert_close(found["loss"], expected)
    rewards = BETA * (policy - base)
    margins = (rewards[:3] - rewards[3:])[:2]
    torch.testing.assert_close(found["margin"], margins.sum().detach())
    assert found["accuracy"] == (margins > 0).sum()
    found["loss"].backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_hopeless_pairs_stay_finite() -> None:
    far = torch.tensor([-1e5], requires_grad=True)
    zero = torch.zeros(1)
    found = preference_loss(far, zero, zero, zero, PreferenceConfig(beta=1.0))
    found["loss"].backward()
    assert found["loss"] == 1e5
    assert far.grad is not None
    assert far.grad == -1


def reference_distillation(
    student: Tensor, teacher: Tensor, targets: Tensor, config: DistillConfig
) -> Tensor:
    """With whole distributions and `F.kl_div`, whose first argument is the second of the KL."""
    mask = targets != IGNORED
    q = F.log_softmax(student.float() / config.temperature, -1)[mask]
    p = F.log_softmax(teacher.float() / config.temperature, -1)[mask]

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return F.kl_div(other, one, reduction="sum", log_target=True)

    middle = (0.5 * (p.exp() + q.exp())).log()
    divergence = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "js": 0.5 * kl(p, middle) + 0.5 * kl(q, middle),
    }[config.divergence]
    entropy = F.cross_entropy(student.float()[mask], targets[mask], reduction="sum")
    return config.mix * config.temperature**2 * divergence + (1 - config.mix) * entropy


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
@pytest.mark.parametrize(("temperature", "mix"), [(1.0, 1.0), (2.0, 0.3), (0.5, 0.0)])
@pytest.mark.parametrize("chunk", [4, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distillation_is_the_published_one(
    divergence: Any, temperature: float, mix: float, chunk: int, dtype: torch.dtype
) -> None:
    config = DistillConfig(
        divergence=divergence, temperature=temperature, mix=mix, chunk_tokens=chunk
    )
    targets, teacher = draw_targets(), draw(4, dtype)
    ours, theirs = (draw(5, dtype).requires_grad_() for _ in range(2))
    found = distill_sums(ours, teacher, targets, config)
    expected = reference_distillation(theirs, teacher, targets, config)
    torch.testing.assert_close(found["loss"], expected, rtol=1e-4, atol=1e-4)
    found["loss"].backward()
    expected.backward()
    # In bfloat16 the reference adds up two rounded gradients, ours one.
    is_half = dtype == torch.bfloat16
    torch.testing.assert_close(
        ours.grad, theirs.grad, rtol=2**-7 if is_half else 1e-3, atol=2**-7 if is_half else 1e-4
    )


def test_a_perfect_student_has_no_divergence() -> None:
    logits = draw(6)
    for divergence in ("forward_kl", "reverse_kl", "js"):
        config = DistillConfig(divergence=divergence)  # type: ignore[arg-type]
        found = distill_sums(logits, logits, draw_targets(), config)
        assert abs(found["divergence"]) < 1e-5
    apart = distill_sums(
        torch.tensor([[[1e4, 0.0]]]),
        torch.tensor([[[0.0, 1e4]]]),
        torch.zeros(1, 1, dtype=torch.int64),
        DistillConfig(divergence="js"),
    )
    assert apart["divergence"].item() == pytest.approx(math.log(2))


def test_no_float32_copy_of_all_logits_is_kept_for_backward() -> None:
    config = DistillConfig(chunk_tokens=2)
    student = draw(7, torch.bfloat16).requires_grad_()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float32:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        distill_sums(student, draw(8, torch.bfloat16), draw_targets(), config)
        sequence_logprobs(student, draw_targets(), chunk_tokens=2)
    assert max(kept, default=0) <= 2 * VOCABULARY


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PreferenceConfig(beta=0), "beta=0"),
        (lambda: PreferenceConfig(label_smoothing=0.5), "label_smoothing=0.5"),
        (lambda: PreferenceConfig(label_smoothing=0.1, loss="ipo"), "loss=ipo"),
        (lambda: DistillConfig(temperature=0), "temperature=0"),
        (lambda: DistillConfig(mix=1.5), "mix=1.5"),
        (lambda: DistillConfig(chunk_tokens=0), "chunk_tokens=0"),
    ],
)
def test_values_that_cannot_be_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
