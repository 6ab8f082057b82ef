"""A complete, tiny, random language model on disk with a byte-level chat tokenizer, and small chats to train it on: for tests of recipes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty"]


def make_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """A tokenizer with one token per byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def write_tiny_llm(
    path: Path,
    *,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    model_type: str = "llama",
    **changes: Any,
) -> Path:
    """Write a model directory as Hugging Face models have it; returns it.

    Args:
        changes: to the architecture, as its configuration names them.
    """
    tokenizer = make_tokenizer(chat_template=chat_template)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = AutoConfig.for_model(model_type, **(shape | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_chats(path: Path, num_samples: int, *, seed: int = 0) -> Path:
    """Write a JSONL file of short chats of varied length; returns it."""
    rows = [chat(seed * 1000 + number) for number in range(num_samples)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def write_preferences(path: Path, num_pairs: int, *, seed: int = 0) -> Path:
    """Write a JSONL file of short pairs of answers, of which the chosen one repeats what was asked for; returns it."""
    rows = []
    for number in range(seed * 1000, seed * 1000 + num_pairs):
        question, chosen = chat(number)
        rejected = chat(number + 1)[1]
        rows.append({"prompt": question["content"], "chosen": [chosen], "rejected": [rejected]})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(number: int) -> list[dict[str, str]]:
    """A question and its answer."""
    words: Sequence[str] = [WORDS[(number * 7 + i) % len(WORDS)] for i in range(1 + number % 5)]
    question = f"{number}: repeat {' '.join(words)}"
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": " ".join(words)},
    ]
