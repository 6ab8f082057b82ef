"""Companions: what lies in a Hugging Face directory beside the weights: configuration, generation settings, tokenizer, chat template.

They are written once per run into a small directory, from which every export copies them.
"""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from backstay.errors import InvalidArgument, ModelError
from backstay.interop.hf_options import DTYPES
from backstay.interop.hf_plan import Spec
from backstay.storage.local import make_directory, sync_directory

CONFIG_NAME = "config.json"
# A model directory may serve as companions, too: its weights are not ours to copy.
_WEIGHT_SUFFIXES = frozenset(
    [".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp"]
)


def save_companions(
    out: str | os.PathLike[str],
    *,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Path:
    """Write what every export of a run needs beside the weights; files that are there already are replaced, each in one step.

    Args:
        out: the directory; recipes use `<out>/companions`.
        config: of the model, so that its class can build it.
        generation_config: None: what the model would have without one.
        tokenizer: with its chat template, if it has one.

    Returns:
        `out`.

    Raises:
        InvalidArgument: `config` is none.
        OSError: a file cannot be written.
    """
    if not isinstance(config, PreTrainedConfig):
        raise InvalidArgument(
            f"save_companions(config=...): expected a transformers configuration, got a {type(config).__name__}"
        )
    out = Path(out).absolute()
    make_directory(out)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        config.save_pretrained(folder)
        generation = generation_config or GenerationConfig.from_model_config(config)
        generation.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            target = out / path.relative_to(folder)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                sync_file(path)
                os.replace(path, target)
    sync_directory(out)
    return out


def find_companions(checkpoint: Path) -> Path:
    """Where recipes put the companions of a checkpoint.

    Raises:
        InvalidArgument: nothing is there.
    """
    place = checkpoint.parent.parent / "companions"
    if not (place / CONFIG_NAME).exists():
        raise InvalidArgument(
            f"{checkpoint}: a checkpoint does not say which architecture it is of, and {place} has no {CONFIG_NAME}; pass "
            "companions=DIR, a directory with config.json and the tokenizer's files (the model's own directory will do)"
        )
    return place


def read_fields(companions: Path) -> dict[str, Any]:
    """The fields of `config.json`.

    Raises:
        ModelError: it is missing or damaged.
    """
    path = companions / CONFIG_NAME
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing: expected a directory that save_companions wrote, or the model's own"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: expected a JSON object, found a {type(fields).__name__}")
    return fields


def copy_companions(companions: Path, draft: Path) -> None:
    """Copy all files but weights and `config.json`, durably.

    Raises:
        OSError: a file cannot be read or written.
    """
    for path in sorted(companions.rglob("*")):
        inside = path.relative_to(companions)
        if path.is_dir() or any(part.startswith(".") for part in inside.parts):
            continue
        if path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json"):
            continue
        if inside == Path(CONFIG_NAME):
            continue
        target = draft / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        sync_file(target)


def write_config(draft: Path, fields: dict[str, Any]) -> None:
    """Write `config.json` as transformers formats it."""
    path = draft / CONFIG_NAME
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    sync_file(path)


def describe_weights(
    fields: dict[str, Any], specs: Iterable[Spec], *, architecture: str, is_untied: bool
) -> dict[str, Any]:
    """The fields of `config.json` for the weights that are written beside it.

    Args:
        is_untied: whether both of two tensors are written that the configuration would tie.
    """
    changes: dict[str, Any] = {"dtype": main_dtype(specs)}
    if is_untied:
        changes["tie_word_embeddings"] = False
    described = replace_fields(fields, changes)
    if changes["dtype"] is not None:
        described["dtype"] = changes["dtype"]
    if is_untied:
        described["tie_word_embeddings"] = False
    described["architectures"] = fields.get("architectures") or [architecture]
    return described


def main_dtype(specs: Iterable[Spec]) -> str | None:
    """The dtype that a model is said to have: that of most of its floating values."""
    names = {dtype: name for name, dtype in (*DTYPES.items(), ("float64", torch.float64))}
    counts: Counter[str] = Counter()
    for spec in specs:
        if spec.dtype in names:
            counts[names[spec.dtype]] += max(1, spec.num_bytes // spec.dtype.itemsize)
    return counts.most_common(1)[0][0] if counts else None


def replace_fields(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The fields with changes wherever they are named, in the configurations of parts as well."""
    replaced: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and name != "quantization_config":
            replaced[name] = replace_fields(value, changes)
        else:
            # Older configurations call it torch_dtype.
            current = "dtype" if name == "torch_dtype" else name
            is_changed = current in changes and changes[current] is not None and value is not None
            replaced[current] = changes[current] if is_changed else value
    return replaced


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
