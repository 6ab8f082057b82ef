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


SFT, DPO, KD = (f"backstay.recipes.{name}" for name in ("sft", "dpo", "kd"))
RECIPES = {
    name: Recipe(module, CONFIGS / file, about)
    for name, module, file, about in (
        ("sft", SFT, "sft.yaml", "fine-tune a causal LM on chats, or on prompts with completions"),
        ("full_sft", SFT, "sft.yaml", "another name for sft"),
        ("lora_sft", SFT, "lora_sft.yaml", "sft of small adapters beside the frozen model"),
        ("qat", SFT, "qat.yaml", "sft of a model that will be quantised"),
        ("qat_lora", SFT, "qat_lora.yaml", "sft of adapters beside a quantised base"),
        ("full_dpo", DPO, "full_dpo.yaml", "prefer chosen answers to rejected ones"),
        (
            "lora_dpo",
            DPO,
            "lora_dpo.yaml",
            "full_dpo of adapters, which are off for reference",
        ),
        ("kd", KD, "kd.yaml", "distil a teacher into a student with the same vocabulary"),
        ("lora_kd", KD, "lora_kd.yaml", "kd of adapters of the student"),
    )
}
