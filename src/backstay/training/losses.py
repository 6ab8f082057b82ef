"""Losses of causal language models, as sums over tokens: whoever knows the number of tokens of all ranks divides."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backstay.errors import ModelError
from backstay.training.batches import IGNORED, MicroBatch

# Packed and separate computation may differ by rounding; a model that sees across documents differs by far more.
LEAK_BOUND = 0.02


def token_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Sum of the cross-entropy of all targets, in float32; logits are computed only where some row has a target."""
    logits = compute_logits(model, batch.ids, batch.positions, kept=batch.kept)
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        batch.targets.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
    )


def compute_logits(
    model: nn.Module, ids: Tensor, positions: Tensor, *, kept: Tensor | int = 0
) -> Tensor:
    """Logits (rows, kept, vocabulary); documents are told apart by positions that begin anew."""
    output: Any = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept)
    return output.logits  # type: ignore[no-any-return]


@torch.no_grad()
def check_packing(model: nn.Module, device: torch.device) -> None:
    """See that a model keeps packed documents apart; on all ranks, as it runs the model.

    Raises:
        ModelError: the second document of a pack gets other logits than alone.
    """
    was_training = model.training
    model.eval()
    first, second = torch.tensor([[3, 5, 7, 6]]), torch.tensor([[2, 4, 8]])
    ids = torch.cat([first, second], 1).to(device)
    count = torch.arange(4)
    positions = torch.cat([count, count[:3]])[None].to(device)
    packed = compute_logits(model, ids, positions)[:, 4:].float()
    alone = compute_logits(model, second.to(device), count[None, :3].to(device)).float()
    model.train(was_training)
    scale = alone.std().clamp_min(1e-6)
    if (packed - alone).abs().max() > LEAK_BOUND * 10 * scale and (
        packed - alone
    ).abs().mean() > LEAK_BOUND * scale:
        raise ModelError(
            f"{type(model).__name__} lets packed documents see each other; set data.packing=false"
        )
