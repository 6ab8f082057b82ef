"""Trainings of a given size for the benchmarks: FSDP2 and AdamW, in a rank with one compute thread."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from backstay.state import local_tensor

# A parameter and the two moments of AdamW, all float32.
BYTES_PER_PARAMETER = 12
HEAD_DIM = 32


class Block(nn.Module):
    """A transformer block; its weights are what a checkpoint mostly consists of."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, sequence, dim] to the same shape."""
        qkv = self.qkv(self.norm_1(hidden)).unflatten(-1, (3, -1, HEAD_DIM))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm_2(hidden))))


class Gpt(nn.Module):
    """A small decoder without positions; `blocks` are what FSDP shards one by one."""

    def __init__(self, num_layers: int, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, num_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] to logits [batch, sequence, token]."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@dataclass
class Training:
    """A sharded model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: Tensor) -> None:
        """One step on tokens [batch, sequence]."""
        logits = self.model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def gpt_of_bytes(num_bytes: int, *, num_layers: int = 12, num_tokens: int = 1024) -> Gpt:
    """A model on the meta device whose state with AdamW's has at least `num_bytes`."""
    dim = HEAD_DIM
    while (12 * num_layers * dim + 2 * num_tokens) * dim * BYTES_PER_PARAMETER < num_bytes:
        dim += HEAD_DIM
    with torch.device("meta"):
        return Gpt(num_layers, dim, num_tokens)


def shard(model: nn.Module, blocks: Iterable[nn.Module]) -> Training:
    """FSDP2 and AdamW; a model on the meta device gets random values."""
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    if is_empty:
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            local = local_tensor(parameter).detach()
            local.fill_(1.0) if parameter.ndim == 1 else local.normal_(std=0.02)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def make_training(num_bytes: int, *, with_state: bool = True) -> Training:
    """A training of at least `num_bytes`, its optimizer's state being there or not."""
    model = gpt_of_bytes(num_bytes)
    training = shard(model, model.blocks)
    if with_state:
        training.step(torch.randint(1024, (1, 9)))
    return training


def count_bytes(training: Training) -> int:
    """Bytes of parameters and moments of all ranks together."""
    return sum(p.numel() for p in training.model.parameters()) * BYTES_PER_PARAMETER


def nudge(training: Training) -> None:
    """A cheap optimizer step, on the vectors only, so that the next save has something new to store."""
    vectors = [p for p in training.model.parameters() if p.ndim == 1]
    for vector in vectors:
        vector.grad = torch.ones_like(vector)
    training.optimizer.step()
    training.optimizer.zero_grad()
