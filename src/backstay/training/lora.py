"""LoRA as a transform of any model: small trainable matrices beside frozen linear layers, by peft; loops do not notice.

Guarantees: base weights are never trained, merged into or otherwise touched; adapters begin with the same values on any number of ranks.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from backstay.errors import ConfigError, ModelError
from backstay.naming import named_parameters
from backstay.save.assembled import Assembled
from backstay.state import MODEL
from backstay.training.config import fixed

ADAPTER = "default"
ALL_LINEAR = "all-linear"
MAGNITUDE = ".lora_magnitude_vector."
PEFT_PREFIX = "base_model.model."
WEIGHTS_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters instead of all weights."""

    # of the two matrices; null trains all weights
    rank: int | None = fixed(None)
    # the adapters' output is scaled by alpha / rank
    alpha: float = fixed(16.0)
    dropout: float = 0.0
    # ends of the names of linear layers; all-linear is all but the head
    targets: tuple[str, ...] = fixed((ALL_LINEAR,))
    # scale by alpha / sqrt(rank) instead
    rslora: bool = fixed(False)
    # DoRA: learn the length of each row of a weight apart from its direction
    dora: bool = fixed(False)
    # of the adapters, whatever the base has
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"lora.rank={self.rank}: expected null or a number >= 1")
        if self.dora and self.rank is None:
            raise ConfigError("lora.dora=true: expected lora.rank as well, found null")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"lora.dropout={self.dropout}: expected a number from 0 to below 1")

    @property
    def is_on(self) -> bool:
        """Whether there are adapters."""
        return self.rank is not None

    def for_peft(self) -> Any:
        """As peft has it."""
        import peft  # slow to import, and most runs do without

        targets = ALL_LINEAR if self.targets == (ALL_LINEAR,) else list(self.targets)
        return peft.LoraConfig(
            r=self.rank or 0,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # it is divided by the rank, and may be any number
            lora_dropout=self.dropout,
            target_modules=targets,
            use_rslora=self.rslora,
            use_dora=self.dora,
            task_type="CAUSAL_LM",
        )


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Put adapters beside linear layers, in place; all else is frozen. Comes before sharding; where the model is on the meta device, so are they.

    Raises:
        ConfigError: no layer has such a name.
    """
    from peft import inject_adapter_in_model

    is_meta = next(model.parameters()).is_meta
    try:
        inject_adapter_in_model(config.for_peft(), model, ADAPTER, low_cpu_mem_usage=is_meta)
    except ValueError as error:
        raise ConfigError(f"lora.targets={list(config.targets)}: {error}") from error
    modules = dict(model.named_modules())
    for name, parameter in adapter_parameters(model):
        parameter.data = parameter.data.to(getattr(torch, config.dtype))
        if MAGNITUDE in name and not isinstance(modules[base_layer_of(name)], nn.Linear):
            raise ConfigError(
                f"lora.dora=true: {base_layer_of(name)} is a {type(modules[base_layer_of(name)]).__name__}, expected a Linear; leave it out of lora.targets"
            )


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """Give adapters the values that they begin with: A as `nn.Linear` begins, B zero, so that the model is its base (Hu et al. 2021)."""
    parameters = named_parameters(model)
    for name, parameter in adapter_parameters(model):
        if MAGNITUDE in name:
            begin_magnitude(parameter, parameters[f"{base_layer_of(name)}.weight"])
            continue
        if ".lora_B." in name:
            parameter.zero_()
            continue
        generator = torch.Generator().manual_seed(
            xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) % 2**63
        )
        bound = 1 / math.sqrt(parameter.shape[1])
        whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        put(parameter, whole)


def base_layer_of(magnitude: str) -> str:
    """The layer whose rows a DoRA magnitude measures, by name."""
    return f"{magnitude.partition(MAGNITUDE)[0]}.base_layer"


def begin_magnitude(parameter: Tensor, weight: Tensor) -> None:
    """The length of each row of the base weight; both are sharded by rows, so that nothing has to be gathered."""
    if isinstance(parameter, DTensor):
        assert isinstance(weight, DTensor), "a layer is sharded as a whole"
        assert parameter.placements == weight.placements, "FSDP2 shards all by rows"
        parameter, weight = parameter.to_local(), weight.to_local()
    parameter.copy_(torch.linalg.norm(weight.float(), dim=1))


def stored_by_peft(name: str) -> str:
    """The name that a parameter has in a peft adapter file."""
    short = name.removesuffix(".weight") if MAGNITUDE in name else name
    plain = f"{short}.".replace(f".{ADAPTER}.", ".").removesuffix(".")
    return f"{PEFT_PREFIX}{plain}"


def put(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a value into place."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if 0 not in shape:
        part = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
        parameter.to_local().copy_(whole[part])


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it is without its adapters, in eval mode: what training started from."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    was_training = model.training
    for layer in layers:
        # Not enable_adapters(), which would also freeze the adapters.
        layer._disable_adapters = True
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for layer in layers:
            layer._disable_adapters = False


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters of adapters by canonical name, in the order of the model."""
    for name, parameter in named_parameters(model).items():
        if is_adapter(name):
            yield name, parameter


def collect_adapter(model: nn.Module) -> dict[str, Tensor]:
    """All values of the adapters under the names that peft stores them by; on all ranks, which gather what is sharded."""
    found = {}
    for name, parameter in adapter_parameters(model):
        value = parameter.detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found[stored_by_peft(name)] = whole.cpu().contiguous()
    return found


def write_adapter(path: Path, values: dict[str, Tensor], config: LoraConfig, base: str) -> None:
    """Write a directory that stock `peft.PeftModel.from_pretrained` loads.

    Args:
        base: name or path of the model that the adapters were trained beside.

    Raises:
        ModelError: there is nothing to write.
    """
    if not values:
        raise ModelError(f"{path}: the model has no adapters")
    path.mkdir(parents=True)
    (path / CONFIG_NAME).write_bytes(encode_config(config, base))
    save_file(values, path / WEIGHTS_NAME, {"format": "pt"})


def adapter_folder(model: nn.Module, config: LoraConfig, base: str) -> Assembled:
    """The same directory as a part of each checkpoint, made by the writer of what is stored anyway."""
    return Assembled(
        folder="adapter",
        weights=WEIGHTS_NAME,
        tensors={stored_by_peft(name): f"{MODEL}{name}" for name, _ in adapter_parameters(model)},
        files={CONFIG_NAME: encode_config(config, base)},
    )


def encode_config(config: LoraConfig, base: str) -> bytes:
    """`adapter_config.json`."""
    fields = config.for_peft().to_dict()
    fields |= {"base_model_name_or_path": base, "inference_mode": True}
    plain = {
        name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()
    }
    return f"{json.dumps(plain, indent=1, default=str)}\n".encode()
