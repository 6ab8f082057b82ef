"""A tiny GGUF file, written with the format's own package from a model that `write_tiny_llm` made."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import AutoModelForCausalLM

from backstay.testing.tiny_llm import make_tokenizer, write_tiny_llm

Kind = GGMLQuantizationType
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
}
CONTROL, NORMAL = 3, 1
TWO_SPACES = "ĠĠ"


def write_tiny_gguf(
    path: Path,
    *,
    kind: GGMLQuantizationType = Kind.F32,
    architecture: str = "llama",
    leave_out: str | None = None,
) -> Any:
    """Write a GGUF file; returns the model it was made from.

    Args:
        kind: of matrices; vectors are float32, as always in this format.
        leave_out: a tensor of the file.
    """
    tokenizer = make_tokenizer()
    source = write_tiny_llm(path.with_suffix(".source"), vocab_size=len(tokenizer) + 1)
    model = AutoModelForCausalLM.from_pretrained(source)
    if kind == Kind.BF16:
        model = model.bfloat16().float()
    writer = GGUFWriter(path, architecture)
    add_architecture(writer, model.config)
    add_tokenizer(writer, tokenizer)
    for name, parameter in model.named_parameters():
        if (stored := gguf_name(name)) != leave_out:
            array = permuted(name, parameter.detach(), model.config).numpy().astype(np.float32)
            stored_kind = kind if array.ndim == 2 else Kind.F32
            writer.add_tensor(stored, quantize(array, stored_kind), raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_name(name: str) -> str:
    """As this format calls a parameter."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def permuted(name: str, value: torch.Tensor, config: Any) -> torch.Tensor:
    """With the halves of each attention head interleaved, as this format has queries and keys."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    num_heads = next((number for part, number in heads.items() if part in name), None)
    if num_heads is None:
        return value
    return value.view(num_heads, 2, -1, value.shape[1]).transpose(1, 2).reshape(value.shape)


def add_architecture(writer: GGUFWriter, config: Any) -> None:
    """The model's shape."""
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)


def add_tokenizer(writer: GGUFWriter, tokenizer: Any) -> None:
    """The vocabulary, with two spaces as one token more: how they are split off shows in the tokens."""
    tokens = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), TWO_SPACES]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [CONTROL if token in tokenizer.all_special_tokens else NORMAL for token in tokens]
    )
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
