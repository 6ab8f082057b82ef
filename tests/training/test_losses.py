"""The loss of packed documents is the sum of their own, and a model that lets them see each other is found out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from backstay.errors import ModelError
from backstay.testing.tiny_llm import make_tokenizer, write_chats, write_tiny_llm
from backstay.training.batches import IGNORED, Collate, Sequences
from backstay.training.losses import check_packing, compute_logits, token_loss
from backstay.training.tokens import Tokenizing, TokenStore, make_store


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TokenStore]:
    home = tmp_path_factory.mktemp("losses")
    model = AutoModelForCausalLM.from_pretrained(write_tiny_llm(home / "model"))
    how = Tokenizing(seq_len=200, too_long="error", use_template=True)
    file = write_chats(home / "d.jsonl", 9)
    made = make_store(file, home, tokenizer=make_tokenizer(), tokenizer_hash="", how=how)
    return model, TokenStore(made)


def reference(model: Any, store: TokenStore) -> float:
    """Each sample alone, all logits, written out."""
    total = 0.0
    for index in range(len(store)):
        ids, learnt = (torch.from_numpy(part.copy()) for part in store[index])
        logits = model(input_ids=ids[None].long()).logits[0, :-1].float()
        wanted = ids[1:].long()[learnt[1:]]
        total += float(F.cross_entropy(logits[learnt[1:]], wanted, reduction="sum"))
    return total


@pytest.mark.parametrize("capacity", [None, 200])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_loss_is_that_of_each_sample_alone(
    parts: tuple[Any, TokenStore], capacity: int | None, rows: int
) -> None:
    model, store = parts
    sequences = Sequences([store], capacity=capacity)
    batches = [
        Collate(0)([sequences[index] for index in range(len(sequences))[at : at + rows]])
        for at in range(0, len(sequences), rows)
    ]
    with torch.no_grad():
        total = sum(float(token_loss(model, batch)) for batch in batches)
        expected = reference(model, store)
    assert total == pytest.approx(expected, rel=1e-6)


def test_logits_at_the_kept_places_are_those_of_the_whole(parts: tuple[Any, TokenStore]) -> None:
    model, store = parts
    sequences = Sequences([store], capacity=200)
    batch = Collate(0)([sequences[0], sequences[1]])
    assert len(batch.kept) < batch.ids.shape[1]
    with torch.no_grad():
        whole = compute_logits(model, batch.ids, batch.positions)
        kept = compute_logits(model, batch.ids, batch.positions, kept=batch.kept)
    torch.testing.assert_close(kept, whole[:, batch.kept], rtol=1e-6, atol=1e-6)


def test_the_gradients_of_a_pack_are_the_sum_of_those_of_its_samples(
    parts: tuple[Any, TokenStore],
) -> None:
    model, store = parts
    found = []
    for capacity in (None, 200):
        sequences = Sequences([store], capacity=capacity)
        for index in range(len(sequences)):
            token_loss(model, Collate(0)([sequences[index]])).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    for alone, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_a_row_without_targets_gives_zero_gradients(parts: tuple[Any, TokenStore]) -> None:
    model, store = parts
    batch = Collate(0)([Sequences([store], capacity=None)[-1]])
    assert (batch.targets == IGNORED).all()
    token_loss(model, batch).backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    model.zero_grad()


class Leaking(nn.Module):
    """Attends to everything before, whatever the positions say."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        seen = self.embedding(input_ids).cumsum(1)
        return SimpleNamespace(logits=seen @ self.embedding.weight.T)


def test_a_model_that_lets_documents_see_each_other_is_refused(
    parts: tuple[Any, TokenStore], tmp_path: Path
) -> None:
    parts[0].train()
    check_packing(parts[0], torch.device("cpu"))
    assert parts[0].training
    parts[0].eval()
    with pytest.raises(ModelError, match="lets packed documents see each other"):
        check_packing(Leaking(), torch.device("cpu"))
