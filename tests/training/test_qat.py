"""Fake quantisation: names stay, the arithmetic is the one written out here, adapters are left alone, and a quantised base keeps what is merged."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from backstay.errors import ConfigError
from backstay.testing.tiny_llm import write_tiny_llm
from backstay.training.lora import LoraConfig, add_adapters
from backstay.training.qat import (
    QatConfig,
    add_fake_quantization,
    set_fake_quantization,
)

INT4 = QatConfig(scheme="int8_dynamic_int4", group_size=8)


def round_weight(weight: Tensor, group_size: int) -> Tensor:
    """Int4, symmetric, by groups."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    scale = groups.abs().amax(-1, keepdim=True) / 7.5
    return ((groups * (1 / scale)).round().clamp(-8, 7) * scale).reshape(weight.shape)


def round_input(x: Tensor) -> Tensor:
    """Int8, asymmetric, by tokens."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / 255
    zero = (-128 - (low / scale).round()).clamp(-128, 127)
    return ((x * (1 / scale)).round() + zero).clamp(-128, 127).sub(zero) * scale


def test_it_computes_what_is_written_out_here() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16))
    x = torch.randn(3, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = model(x)
    add_fake_quantization(model, INT4)
    after = model.state_dict()
    assert {*after} == {*before}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    wanted = linear(round_input(x), round_weight(before["0.weight"], 8), before["0.bias"])
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(wanted, plain, atol=1e-3)
    model(x).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0
    set_fake_quantization(model, False)
    assert torch.equal(model(x), plain)


def test_it_begins_by_the_step_alone() -> None:
    config = QatConfig(scheme="int8_dynamic_int8", start_step=3)
    assert [config.is_active(step) for step in range(5)] == [False] * 3 + [True] * 2


def test_a_layer_that_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="does not divide the 12 inputs of 1"):
        add_fake_quantization(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4)), INT4)


def test_adapters_and_head_are_not_quantised(tmp_path: object) -> None:
    from torchao.quantization.qat import FakeQuantizedLinear

    model = AutoModelForCausalLM.from_pretrained(write_tiny_llm(tmp_path / "model"))
    add_fake_quantization(model, INT4)
    add_adapters(model, LoraConfig(rank=2))
    kinds = {name: type(each) for name, each in model.named_modules()}
    fake = {name for name, kind in kinds.items() if kind is FakeQuantizedLinear}
    assert fake
    assert all(name.endswith(".base_layer") for name in fake)
    assert kinds["lm_head"] is nn.Linear
