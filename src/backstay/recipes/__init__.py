"""Whole training programs with their loops in full view: read one, copy it, change it. No torch: the list is for looking, too."""

import logging
from dataclasses import dataclass
from pathlib import Path

# What these say while they are imported, about other packages and future versions, no user of a recipe can act on.
for _name in ("torch.utils._pytree", "torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Recipe:
    """A recipe by name.

    Attributes:
        module: the program, for `python -m`.
        config: its YAML file.
        about: what it does, in one line.
    """

    module: str
    config: Path
    about: str


RECIPES = {
    "sft": Recipe(
        "backstay.recipes.sft",
        CONFIGS / "sft.yaml",
        "supervised fine-tuning of a causal LM on chats, or on prompts with completions",
    ),
    "lora_sft": Recipe(
        "backstay.recipes.sft",
        CONFIGS / "lora_sft.yaml",
        "the same, training small adapters beside the frozen model",
    ),
}
