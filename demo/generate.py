"""Write a docstring with a model, as anybody would who has only transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

MAX_NEW_TOKENS = 48


@dataclass(frozen=True)
class Written:
    """What a model wrote."""

    text: str


def write_docstring(path: Path, example: Mapping[str, Any]) -> Written:
    """Load the model at `path` and have it answer the example's question, greedily."""
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    inputs = tokenizer.apply_chat_template(
        example["messages"][:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    return Written(tokenizer.decode(answer, skip_special_tokens=True).strip())
