"""Quantised models on disk, without pickle: a Hugging Face directory with int8 codes, scales and zero points, as torchao names them.

`<layer>._weight_qdata` (int8; int4 codes take a byte each), `<layer>._weight_scale`, `<layer>._weight_zero_point`; all else under its own name.
What they mean is in the file's metadata. `quantization_config` in config.json lets the stock transformers loader read it as well.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, TorchAoConfig

from backstay.errors import ModelError
from backstay.interop.hf_companions import copy_companions, read_fields, sync_file, write_config
from backstay.interop.hf_draft import Draft, check_free

WEIGHTS_NAME = "model.safetensors"


def write_quantized(
    out: Path, tensors: dict[str, Tensor], *, scheme: Any, companions: Path, skipped: list[str]
) -> None:
    """Write a quantised model; it appears under its name when it is complete.

    Args:
        tensors: its state dict; one of several tied names will do.
        scheme: as torchao has it.
        companions: what `save_companions` wrote.
        skipped: names of linear layers that are not quantised, such as the head.

    Raises:
        InvalidArgument: `out` exists.
        OSError: it cannot be written.
    """
    from torchao.prototype.safetensors.safetensors_support import (  # type: ignore[import-untyped]
        flatten_tensor_state_dict,
    )

    check_free(out)
    flat, metadata = flatten_tensor_state_dict({name: t.data for name, t in tensors.items()})
    fields = read_fields(companions)
    fields["quantization_config"] = TorchAoConfig(scheme, modules_to_not_convert=skipped).to_dict()
    draft = Draft(out)
    try:
        save_file(flat, draft.path / WEIGHTS_NAME, {**metadata, "format": "pt"})
        sync_file(draft.path / WEIGHTS_NAME)
        copy_companions(companions, draft.path)
        write_config(draft.path, fields)
        draft.publish()
    finally:
        draft.discard()


def load_quantized(path: Path) -> nn.Module:
    """The model that `write_quantized` wrote, in eval mode, on the CPU.

    Raises:
        ModelError: the directory is no such model, or damaged.
    """
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    fields = read_fields(path)
    if not fields.pop("quantization_config", None):
        raise ModelError(
            f"{path}: config.json has no quantization_config; expected a quantised model"
        )
    try:
        with safe_open(path / WEIGHTS_NAME, framework="pt") as file:
            names = [*file.keys()]
            flat, metadata = {name: file.get_tensor(name) for name in names}, file.metadata()
        tensors, left = unflatten_tensor_state_dict(flat, metadata)
    except (SafetensorError, OSError, ValueError, TypeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path / WEIGHTS_NAME}: not a quantised model: {error}") from error
    model_type = fields.pop("model_type")
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    report = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    missing = {*report.missing_keys} - {*(model.all_tied_weights_keys or {})}
    if missing or report.unexpected_keys or left:
        raise ModelError(
            f"{path}: missing {sorted(missing)}, unexpected {sorted([*report.unexpected_keys, *left])}"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not any(parameter.is_meta for parameter in model.parameters()), "all have values"
    return model.eval()  # type: ignore[no-any-return]


def quantized_state(model: nn.Module, scheme: Any, skipped: list[str]) -> dict[str, Tensor]:
    """The state dict of a plain model with its linear layers quantised; the model is not changed."""
    from torchao.quantization import quantize_  # type: ignore[import-untyped]

    layers = {
        n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in skipped
    }
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner = name.removesuffix(".weight")
        if owner not in layers:
            if not any(owner == each for each in skipped):
                found[name] = tensor.detach()
            continue
        rows, columns = tensor.shape
        layer = nn.Linear(columns, rows, bias=False, device="meta")
        layer.weight = nn.Parameter(tensor.detach().clone(), requires_grad=False)
        quantize_(layer, scheme)
        found[name] = layer.weight
    config: Any = model.config
    if not config.tie_word_embeddings:
        found |= {f"{name}.weight": model.state_dict()[f"{name}.weight"] for name in skipped}
    return found
