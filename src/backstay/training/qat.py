"""Quantisation-aware training as a transform of any model: linear layers compute with rounded weights and inputs, by torchao; loops do not notice.

Guarantees: names and values of parameters stay, so checkpoints fit the plain model; the fake quantisers have no state: ranges come from each input anew.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from backstay.errors import ConfigError
from backstay.training.config import fixed


@dataclass(frozen=True, kw_only=True)
class QatConfig:
    """Training for a quantised model: all linear layers but the head."""

    # weights as int4 in groups, or int8 per row; inputs as int8 per token. null: off
    scheme: Literal["int8_dynamic_int4", "int8_dynamic_int8"] | None = fixed(None)
    # of int4 weights that share a scale
    group_size: int = fixed(32)
    # updates before it begins
    start_step: int = fixed(0)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(f"qat.group_size={self.group_size}: expected a number >= 2")
        if self.start_step < 0:
            raise ConfigError(f"qat.start_step={self.start_step}: expected a number >= 0")

    @property
    def is_on(self) -> bool:
        """Whether there is any."""
        return self.scheme is not None

    def is_active(self, step: int) -> bool:
        """Whether a model with so many updates behind it computes quantised: of the step alone, so that nothing has to be restored."""
        return self.is_on and step >= self.start_step

    def for_torchao(self) -> Any:
        """As torchao has it.

        Raises:
            ConfigError: it is not installed.
        """
        try:
            from torchao.quantization import (  # type: ignore[import-untyped]
                Int8DynamicActivationIntxWeightConfig,
                PerAxis,
                PerGroup,
            )
        except ImportError as error:
            raise ConfigError(
                f"qat.scheme={self.scheme} needs torchao: pip install torchao ({error})"
            ) from error
        if self.scheme == "int8_dynamic_int4":
            return Int8DynamicActivationIntxWeightConfig(
                weight_dtype=torch.int4,  # type: ignore[attr-defined]
                weight_granularity=PerGroup(self.group_size),
            )
        return Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int8, weight_granularity=PerAxis(0)
        )


def add_fake_quantization(model: nn.Module, config: QatConfig) -> None:
    """Swap linear layers for fake-quantised ones, in place. Comes before adapters, which are not quantised, and before sharding; the meta device will do.

    Raises:
        ConfigError: a layer does not fit, or torchao is missing; nothing was changed.
    """
    base = config.for_torchao()
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig  # type: ignore[import-untyped]

    layers = dict(linear_layers(model))
    check_groups(layers, config)
    chosen = {id(layer) for layer in layers.values()}
    quantize_(model, QATConfig(base, step="prepare"), lambda layer, _: id(layer) in chosen)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """All linear layers but the head, by name."""
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            yield name, layer


def check_groups(layers: dict[str, nn.Linear], config: QatConfig) -> None:
    """See that each row is a whole number of groups.

    Raises:
        ConfigError: the first layer for which it is not.
    """
    if not layers:
        raise ConfigError(f"qat.scheme={config.scheme}: the model has no linear layers but a head")
    if config.scheme != "int8_dynamic_int4":
        return
    for name, layer in layers.items():
        if layer.in_features % config.group_size:
            raise ConfigError(
                f"qat.group_size={config.group_size} does not divide the {layer.in_features} inputs of {name}; use a divisor of them"
            )


def set_fake_quantization(model: nn.Module, is_on: bool) -> None:
    """Let all fake-quantised layers compute quantised, or as plain ones."""
    from torchao.quantization.qat import FakeQuantizedLinear

    for layer in model.modules():
        if isinstance(layer, FakeQuantizedLinear):
            layer.activation_fake_quantizer.enabled = is_on
            layer.weight_fake_quantizer.enabled = is_on
