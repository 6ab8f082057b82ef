"""How a model is spread over ranks: FSDP2 on one mesh, optionally replicated (HSDP), with mixed precision and activation checkpointing.

A single rank that computes in float32 has nothing to shard and nothing to cast: its model stays as it is, and no copy is paid for.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from backstay.errors import ConfigError, ModelError


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How to compute."""

    # copies of the model; more than one is HSDP: sharded within each group of ranks, replicated between them
    replicas: int = 1
    # of forward and backward; gradients are reduced in float32
    precision: Literal["float32", "bfloat16"] = "float32"
    # free a layer's gathered weights between forward and backward; false is faster and takes more memory
    reshard_after_forward: bool = True
    # compute each layer's activations again in backward instead of keeping them
    activation_checkpointing: bool = False
    # torch.compile each layer
    compile: bool = False

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"parallel.replicas={self.replicas}: expected a number >= 1")


def check_world(config: ParallelConfig, world_size: int) -> None:
    """See that the ranks fit the mesh.

    Raises:
        ConfigError: they do not.
    """
    if world_size % config.replicas:
        raise ConfigError(
            f"parallel.replicas={config.replicas} does not divide the {world_size} ranks; use a divisor of {world_size}, or another number of ranks"
        )


def make_mesh(config: ParallelConfig, device: torch.device, world_size: int) -> DeviceMesh:
    """The mesh of all ranks; two-dimensional for HSDP."""
    if config.replicas == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type,
        (config.replicas, world_size // config.replicas),
        mesh_dim_names=("replicate", "shard"),
    )


def find_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers model: what is sharded, compiled and recomputed one at a time.

    Raises:
        ModelError: the model does not say what they are.
    """
    names = {*(getattr(model, "_no_split_modules", None) or ())}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} does not name its repeated layers (_no_split_modules), so it cannot be sharded"
        )
    return layers


def spread(model: nn.Module, config: ParallelConfig, mesh: DeviceMesh) -> None:
    """Shard a model in place, layer by layer."""
    layers = find_layers(model)
    if config.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    is_alone = mesh.size() == 1
    if config.compile:
        for layer in layers:
            layer.compile()
    if is_alone and config.precision == "float32":
        return
    is_freed = config.reshard_after_forward and not is_alone
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.precision), reduce_dtype=torch.float32
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=is_freed)
    fully_shard(model, mesh=mesh, mp_policy=policy)
