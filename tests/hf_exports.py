"""Tiny random transformers models for tests of the export, and how exports are compared."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from backstay import Checkpointer, TrainState
from backstay.coordination import Coordination
from backstay.interop.hf import ExportOptions, export_model, save_companions

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
TOKENS = torch.arange(16).view(2, 8)


class MixedConfig(PreTrainedConfig):
    """Of `MixedModel`."""

    model_type = "backstay_mixed"

    def __init__(self, widths: tuple[int, ...] = (4,), **rest: Any) -> None:
        super().__init__(**rest)
        self.widths = list(widths)
        self.vocab_size = 4


class MixedModel(PreTrainedModel, GenerationMixin):
    """Vectors of given lengths, and buffers of many kinds: integers, booleans, no dimension, no element, not to be saved."""

    config_class = MixedConfig

    def __init__(self, config: MixedConfig) -> None:
        super().__init__(config)
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(n)) for n in config.widths])
        self.norm = nn.LayerNorm(4)
        self.register_buffer("counts", torch.arange(5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("cache", torch.ones(7), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave everything as it is."""

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.norm(input_ids.float()))


AutoConfig.register("backstay_mixed", MixedConfig)
AutoModelForCausalLM.register(MixedConfig, MixedModel)


def tiny_config(model_type: str = "llama", **changes: Any) -> Any:
    """An architecture."""
    return AutoConfig.for_model(model_type, **(SHAPE | EXPERTS.get(model_type, {}) | changes))


def tiny_model(model_type: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """A random model, in float32."""
    return build(tiny_config(model_type, **changes), seed=seed)


def build(config: Any, *, seed: int = 0) -> Any:
    """A random model of a configuration."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def export(model: Any, out: Path, **options: Any) -> Path:
    """Export a model alone, with companions of its own beside."""
    companions = save_companions(
        out.parent / f"{out.name}-companions", config=getattr(model, "_orig_mod", model).config
    )
    ranks = Coordination(timeout_s=10)
    return export_model(
        model, out, companions=companions, options=ExportOptions(**options), ranks=ranks
    )


def save_checkpoint(model: nn.Module, out: Path) -> Path:
    """Save step 1 as recipes do: `<out>/companions`, `<out>/checkpoints/step-00000001`."""
    save_companions(out / "companions", config=model.config)  # type: ignore[arg-type]
    with Checkpointer(out / "checkpoints", TrainState(model=model)) as checkpointer:
        checkpointer.save(1)
    return out / "checkpoints/step-00000001"


def content(folder: Path) -> dict[str, bytes]:
    """All files of a directory."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of an export; each is in one file only, and in the index if there is one."""
    found: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                assert name not in found
                found[name], places[name] = file.get_tensor(name), path.name
    index = folder / "model.safetensors.index.json"
    if len({*places.values()}) > 1:
        document = json.loads(index.read_text())
        assert document["weight_map"] == places
        assert document["metadata"]["total_size"] == sum(each.nbytes for each in found.values())
    else:
        assert not index.exists()
    return found


def config_of(folder: Path) -> dict[str, Any]:
    """The fields of its `config.json`."""
    fields: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return fields


def load(folder: Path) -> Any:
    """What stock transformers makes of an export; it must find everything, and nothing more."""
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Of a few tokens."""
    return model(input_ids=TOKENS).logits  # type: ignore[no-any-return]


def assert_loads_as(model: Any, folder: Path) -> None:
    """Stock transformers loads the same model."""
    assert torch.equal(logits(load(folder)), logits(model))
