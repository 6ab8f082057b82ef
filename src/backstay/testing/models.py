"""Tiny models and training loops that have every oddity a checkpoint must survive, and fit in milliseconds.

Everything is deterministic: the same seed and number of ranks give the same bits. All ranks build the same model and draw
different dropout masks; the samples of a step depend on the sampler only, not on the number of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler, StepLR

from backstay.errors import InvalidArgument
from backstay.testing.factored import Factored

NUM_TOKENS = 16
SEQUENCE = 6
# Divides over 1, 2, 3 and 4 ranks.
GLOBAL_BATCH = 12

Kind = Literal["single", "ddp", "fsdp2", "hsdp"]
OptimizerKind = Literal["adamw", "sgd", "adafactor", "factored", "two", "in_backward"]


class Block(nn.Module):
    """Residual block with a frozen parameter and dropout; under FSDP2 a group of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.frozen_scale = nn.Parameter(torch.linspace(0.5, 1.5, dim), requires_grad=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., dim] to the same shape."""
        return hidden + cast(Tensor, self.dropout(self.mlp(self.norm(hidden) * self.frozen_scale)))


class TinyModel(nn.Module):
    """Next-token model with tied embedding and head, a frozen and a never-used parameter, dropout, and a rebound buffer."""

    running_mean: Tensor

    def __init__(self, dim: int = 8, num_tokens: int = NUM_TOKENS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, dim)
        self.block = Block(dim)
        self.head = nn.Linear(dim, num_tokens, bias=False)
        self.head.weight = self.embedding.weight
        self.never_used = nn.Parameter(torch.linspace(-1.0, 1.0, dim))
        self.register_buffer("running_mean", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] to logits [batch, sequence, token]."""
        hidden = self.block(self.embedding(tokens))
        # Rebound, not changed in place: a reference to the old buffer goes stale at each step.
        self.running_mean = 0.9 * self.running_mean + 0.1 * hidden.detach().mean()
        return cast(Tensor, self.head(hidden))


class UnevenModel(nn.Module):
    """A ring of linear layers, so that every one of `dims` is some parameter's first dimension."""

    def __init__(self, dims: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.width = dims[0]
        ring = [*dims, dims[0]]
        self.layers = nn.ModuleList(
            nn.Linear(size, following) for size, following in zip(dims, ring[1:], strict=True)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] to logits [batch, sequence, token]; they mean nothing, but depend on every parameter."""
        hidden = (tokens / self.num_tokens)[..., None].expand(*tokens.shape, self.width)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        powers = torch.arange(self.num_tokens) / self.num_tokens
        return hidden.sum(-1, keepdim=True) * powers


def uneven_model(dims: tuple[int, ...] = (1, 2, 5, 7)) -> UnevenModel:
    """A model whose parameters do not divide evenly over ranks, some having fewer rows than there are ranks."""
    return UnevenModel(dims)


@dataclass
class TinySampler:
    """Endless shuffled sample ids; its whole state is one position and the seed."""

    num_samples: int = 40
    seed: int = 0
    position: int = 0

    def take(self, count: int) -> list[int]:
        """The next `count` ids; each epoch is a permutation of its own."""
        ids = [self._id_at(index) for index in range(self.position, self.position + count)]
        self.position += count
        return ids

    def _id_at(self, index: int) -> int:
        epoch, offset = divmod(index, self.num_samples)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return int(torch.randperm(self.num_samples, generator=generator)[offset])

    def state_dict(self) -> dict[str, int]:
        return {"num_samples": self.num_samples, "seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_samples = state["num_samples"]
        self.seed = state["seed"]
        self.position = state["position"]


@dataclass(kw_only=True)
class Training:
    """Everything that a training loop holds.

    Attributes:
        model: as the loop calls it, so wrapped under DDP.
        optimizers: empty gradients are not among their duties under "in_backward", where each holds one parameter.
        lr_schedulers: one per optimizer; none under "in_backward".
        losses: of this rank, one per step.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    lr_schedulers: list[LRScheduler]
    sampler: TinySampler
    in_backward: bool = False
    losses: list[float] = field(default_factory=list)

    @property
    def optimizer(self) -> Any:
        """The optimizer, or the list of them where there are several."""
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler, the list of them where there are several, or None."""
        if not self.lr_schedulers:
            return None
        return self.lr_schedulers[0] if len(self.lr_schedulers) == 1 else self.lr_schedulers


def make_training(
    kind: Kind = "single",
    mesh: DeviceMesh | None = None,
    *,
    optimizer: OptimizerKind = "adamw",
    model: Callable[[], nn.Module] = TinyModel,
    seed: int = 0,
) -> Training:
    """Build a model, its optimizers, schedulers and sampler, ready for `train_step`.

    Args:
        mesh: over all ranks for "fsdp2"; (replicate, shard) for "hsdp"; made here if None.
        optimizer: "two" is AdamW for matrices beside SGD with momentum for vectors; "in_backward" is one AdamW per parameter
            that steps during the backward pass; "adafactor" is torch's, "factored" is one of ours that also takes DTensors.
        model: builds the model on the CPU.
        seed: of the weights, and with the rank added of dropout.
    """
    if kind in ("fsdp2", "hsdp") and optimizer == "adafactor":
        raise InvalidArgument("torch's Adafactor can't step on DTensors; use 'factored' instead")
    if kind == "ddp" and optimizer == "in_backward":
        raise InvalidArgument("DDP reduces gradients after its hooks, too late for 'in_backward'")
    torch.manual_seed(seed)
    wrapped = _parallelize(model(), kind, mesh)
    torch.manual_seed(seed + 1000 + _rank())
    optimizers = _optimizers(wrapped, optimizer)
    in_backward = optimizer == "in_backward"
    schedulers = [] if in_backward else [StepLR(each, 2, gamma=0.5) for each in optimizers]
    return Training(
        model=wrapped,
        optimizers=optimizers,
        lr_schedulers=[*schedulers],
        sampler=TinySampler(seed=seed),
        in_backward=in_backward,
    )


def train_step(training: Training) -> float:
    """One step on the sampler's next samples; returns this rank's loss."""
    loss = loss_of(training.model, next_batch(training.sampler))
    loss.backward()
    if not training.in_backward:
        for optimizer in training.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for scheduler in training.lr_schedulers:
        scheduler.step()
    training.losses.append(loss.item())
    return training.losses[-1]


def next_batch(sampler: TinySampler) -> Tensor:
    """This rank's part of the next global batch: tokens [batch, sequence + 1], a pure function of the sample ids."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if GLOBAL_BATCH % world_size:
        raise InvalidArgument(f"{GLOBAL_BATCH} samples do not divide over {world_size} ranks")
    ids = torch.tensor(sampler.take(GLOBAL_BATCH)).view(world_size, -1)[_rank()]
    return (ids[:, None] * 7 + torch.arange(SEQUENCE + 1) * (3 + ids[:, None] % 2)) % NUM_TOKENS


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _parallelize(model: nn.Module, kind: Kind, mesh: DeviceMesh | None) -> nn.Module:
    if kind == "single":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if kind not in ("fsdp2", "hsdp"):
        raise InvalidArgument(f"expected 'single', 'ddp', 'fsdp2' or 'hsdp', got {kind!r}")
    mesh = mesh or _default_mesh(kind)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _default_mesh(kind: Kind) -> DeviceMesh:
    world_size = dist.get_world_size()
    if kind == "fsdp2":
        return init_device_mesh("cpu", (world_size,))
    return init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [model.block] if isinstance(model, TinyModel) else []


def _optimizers(model: nn.Module, kind: OptimizerKind) -> list[torch.optim.Optimizer]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim > 1]
    vectors = [p for p in trainable if p.ndim <= 1]
    if kind == "adamw":
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, lr=0.01)]
    if kind == "sgd":
        return [torch.optim.SGD(trainable, lr=0.1, momentum=0.9)]
    if kind == "adafactor":
        return [torch.optim.Adafactor(trainable, lr=0.01)]
    if kind == "factored":
        return [Factored(trainable, lr=0.01)]
    if kind == "two":
        return [
            torch.optim.AdamW(matrices, lr=0.01),
            torch.optim.SGD(vectors, lr=0.1, momentum=0.9),
        ]
    if kind == "in_backward":
        return [_step_in_backward(parameter) for parameter in trainable]
    raise InvalidArgument(f"expected one of {get_args(OptimizerKind)}, got {kind!r}")


def _step_in_backward(parameter: nn.Parameter) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([parameter], lr=0.01)

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)
    return optimizer


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
