"""convert_gguf: a GGUF file as a Hugging Face directory, so that a training can start from it and stock transformers can load it.

Guarantees: a directory under its final name is complete; several processes may convert into the same one.
"""

import importlib.util
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GgufConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from backstay.errors import InvalidArgument, ModelError

MAGIC = b"GGUF"
# What a converted directory has at least; weights of many gigabytes are several files with an index.
REQUIRED = ("config.json", "tokenizer.json", "model*.safetensors")
# What the readers below throw at a file that is damaged, or of an architecture they don't know.
UNREADABLE = (ValueError, KeyError, IndexError, OSError, TypeError, struct.error)
# `tokenizer.ggml.pre` of vocabularies whose texts were split into single digits before anything else (as llama.cpp does for them);
# transformers takes them for GPT-2's, which gives other tokens where several spaces come before a number: that is, all over code.
SPLIT_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)


def convert_gguf(gguf_file: Path, out: Path) -> Path:
    """Write a model directory from a GGUF file: config, generation config, weights, tokenizer and chat template.

    Weights are stored as bfloat16 if that changes none of them, which is so for a file of bfloat16 ones; else as float32, because what
    comes out of float16 and of quantized blocks has more bits than bfloat16 keeps. A whole model in float32 has to fit into memory.

    Text is split, before tokens are made of it, by the rule the file names (`tokenizer.ggml.pre`); like GPT-2's, if neither transformers
    nor this module knows that one.

    Args:
        out: the directory to make. A complete one is returned as it is, whatever file it was made from.

    Returns:
        `out`.

    Raises:
        InvalidArgument: this is no GGUF file, or `out` is something else.
        ModelError: the package gguf is missing, or the model cannot be converted.
    """
    if out.exists():
        check_complete(out)
        return out
    check_magic(gguf_file)
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{gguf_file}: reading it needs the package gguf: pip install gguf")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{out.name}.incomplete-", dir=out.parent) as home:
        # By itself in a directory: transformers would take a tokenizer or a configuration that lies beside it instead.
        alone = Path(home) / "model.gguf"
        alone.symlink_to(gguf_file.resolve())
        model, tokenizer = read_gguf(alone, gguf_file)
        unfinished = Path(home) / "converted"
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        publish(unfinished, out)
    return out


def check_complete(out: Path) -> None:
    """See that a directory may be what an earlier conversion left."""
    missing = [name for name in REQUIRED if not any(out.glob(name))]
    if missing:
        raise InvalidArgument(
            f"{out}: exists, but is no converted model ({', '.join(missing)} missing); remove it, or convert into another directory"
        )


def check_magic(gguf_file: Path) -> None:
    """See that a file is of this format at all, before anything large is loaded."""
    try:
        with gguf_file.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise InvalidArgument(f"{gguf_file}: expected a GGUF file: {error.strerror}") from error
    if start != MAGIC:
        found = f"begins with {start!r}" if start else "is empty"
        raise InvalidArgument(
            f"{gguf_file}: expected a GGUF file, which begins with {MAGIC!r}; this one {found}"
        )


def read_gguf(alone: Path, gguf_file: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model, in the dtype it is to be stored in, and its tokenizer.

    Args:
        alone: where to read it.
        gguf_file: what to call it.

    Raises:
        ModelError: the file is damaged, or its architecture is unknown to transformers.
    """
    try:
        splitting = read_splitting(alone)
        model, missing = read_model(alone)
        tokenizer = read_tokenizer(alone, splitting)
    except UNREADABLE as error:
        raise ModelError(
            f"{gguf_file}: damaged, or not a model that transformers can read from GGUF: {error!r}"
        ) from error
    if missing:
        raise ModelError(f"{gguf_file}: has no weights for {', '.join(missing)}")
    if (max_tokens := getattr(model.config, "max_position_embeddings", None)) is not None:
        tokenizer.model_max_length = max_tokens
    return model, tokenizer


def read_splitting(gguf_file: Path) -> str | None:
    """The name of the rule by which text is split before tokens are made of it."""
    from gguf import GGUFReader

    field = GGUFReader(gguf_file).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def read_model(gguf_file: Path) -> tuple[Any, list[str]]:
    """The model without its quantization, and which parameters the file does not have."""
    found: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        # Given, because transformers would read the file's metadata, which takes seconds, once more for it.
        config=AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name),
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model, loaded = found
    is_short = all(map(fits_bfloat16, model.parameters()))
    return model.to(torch.bfloat16) if is_short else model, sorted(loaded["missing_keys"])


def fits_bfloat16(parameter: nn.Parameter) -> bool:
    """Whether bfloat16 can hold every value as it is."""
    return torch.equal(parameter.to(torch.bfloat16).to(parameter.dtype), parameter)


def read_tokenizer(gguf_file: Path, splitting: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer as the file describes it."""
    from tokenizers import pre_tokenizers

    # Not AutoTokenizer: it may choose a class for the architecture that rebuilds parts of the tokenizer by rules of its own.
    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name
    )
    if splitting in SPLIT_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer


def publish(unfinished: Path, out: Path) -> None:
    """Give a finished directory its name; another process may have been as fast."""
    for path in unfinished.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        os.rename(unfinished, out)
    except OSError:
        if not out.is_dir():
            raise
        check_complete(out)
