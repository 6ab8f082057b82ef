"""Every recipe in every mode: interrupted and resumed in new processes, it is the run that nobody touched, to the last bit.

`python -m pytest tests/recipes/test_recipe_table.py -v` prints the table. An epoch is as short as a save, and a save follows right after the one before;
the last one, at the end, is waited for.
"""

from pathlib import Path
from typing import Any

import pytest
from sft_runs import Stop, final_state, make_inputs, records, run_sft, steps_by_attempt

from backstay.recipes import RECIPES
from backstay.testing.tiny_llm import write_preferences, write_tiny_llm
from backstay.training.signals import STOPPED

MODES = ("async", "sync")
NAMES = [name for name in RECIPES if name != "full_sft"]
SIZE = {"lora.rank": 4, "lora.dropout": 0.1}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: Any) -> dict[str, Any]:
    """Model, teacher and data for all recipes: an epoch has two updates."""
    home = tmp_path_factory.mktemp("table")
    values = make_inputs(home, num_sequences=8)
    write_preferences(home / "pairs.jsonl", 8)
    write_preferences(home / "eval-pairs.jsonl", 4, seed=9)
    write_tiny_llm(home / "teacher", seed=5)
    return {**values, "home": home}


def values_for(name: str, mode: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """What a recipe runs with."""
    home = inputs["home"]
    values: dict[str, Any] = {
        "model.path": inputs["model.path"],
        "data.train": inputs["data.train"],
        "data.eval": home / "eval.jsonl",
        "data.packing": "false",
        "epochs": 3,
        "checkpoint.every_steps": 1,
        "checkpoint.mode": mode,
    }
    if "dpo" in name:
        values |= {"data.train": home / "pairs.jsonl", "data.eval": home / "eval-pairs.jsonl"}
    if "kd" in name:
        values["teacher.path"] = home / "teacher"
    return values | (SIZE if "lora" in name else {})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_resumed_is_uninterrupted(
    name: str, mode: str, inputs: dict[str, Any], tmp_path: Path
) -> None:
    """P61: resume wraps the loaded adapter in a fresh one."""
    values = values_for(name, mode, inputs)
    assert run_sft(tmp_path / "whole", values, ranks=2, recipe=name) == [0, 0]
    # Two micro-batches per rank and update: between those of the fourth.
    stop = Stop(2 * 3)
    assert run_sft(tmp_path / "parts", values, ranks=2, recipe=name, stop=stop) == [STOPPED] * 2
    assert run_sft(tmp_path / "parts", values, ranks=2, recipe=name) == [0, 0]
    assert steps_by_attempt(tmp_path / "parts") == [[1, 2, 3], [4, 5, 6]]
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert final_state(tmp_path / "parts") == final_state(tmp_path / "whole")
    losses = [record["loss"] for step, record in records(tmp_path / "whole").items() if step]
    assert losses[-1] != losses[0]
