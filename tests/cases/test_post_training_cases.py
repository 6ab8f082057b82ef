"""Field cases of adapters, references and teachers: each by its id, on two ranks."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from sft_runs import make_inputs, records, run_sft
from transformers import AutoModelForCausalLM

from backstay import Catalog
from backstay.errors import ModelError
from backstay.testing.tiny_llm import write_preferences, write_tiny_llm
from backstay.training.lora import LoraConfig, write_adapter
from backstay.training.runtime import BAD_INPUT

LORA = {"lora.rank": 4}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: Any) -> dict[str, Any]:
    """A model, chats and pairs."""
    home = tmp_path_factory.mktemp("cases")
    values = make_inputs(home, num_sequences=8, attention_dropout=0.0)
    write_preferences(home / "pairs.jsonl", 8)
    return {**values, "data.packing": "false", "home": home}


def values_of(inputs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name != "home"} | more


def test_an_adapter_without_values_is_refused(tmp_path: Path) -> None:
    """P58: empty adapter file of a few bytes."""
    with pytest.raises(ModelError, match="no adapters"):
        write_adapter(tmp_path / "adapter", {}, LoraConfig(rank=4), "base")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    "change", [{"lora.rank": 8}, {"lora.alpha": 4.0}, {"lora.targets": "q_proj"}]
)
def test_another_adapter_is_refused(
    change: dict[str, Any], inputs: dict[str, Any], tmp_path: Path, capfd: Any
) -> None:
    """P59: partial or foreign adapter loads successfully."""
    values = values_of(inputs, **LORA)
    assert run_sft(tmp_path / "out", values) == [0]
    assert run_sft(tmp_path / "out", {**values, **change, "epochs": 3}) == [BAD_INPUT]
    assert next(iter(change)) in capfd.readouterr().out


@pytest.mark.parametrize("recipe", ["full_dpo", "lora_dpo"])
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_training_starts_at_its_reference(
    recipe: str, loss: str, inputs: dict[str, Any], tmp_path: Path
) -> None:
    """P62: reference adapter loaded nowhere, or over the policy. P63: disabling adapters is not always the reference."""
    pairs = inputs["home"] / "pairs.jsonl"
    values = values_of(inputs, **(LORA if "lora" in recipe else {}))
    values |= {"data.train": pairs, "data.eval": pairs, "eval.at_start": "true"}
    values["preference.loss"] = loss
    assert run_sft(tmp_path / "out", values, ranks=2, recipe=recipe) == [0, 0]
    found = records(tmp_path / "out")
    at_start = math.log(2) if loss == "sigmoid" else (1 / (2 * 0.1)) ** 2
    assert found[0]["eval_loss"] == pytest.approx(at_start, abs=1e-6)
    assert found[max(found)]["eval_loss"] < at_start - 1e-3, "and goes away from it"
    entry = Catalog(tmp_path / "out" / "checkpoints").latest()
    assert entry is not None
    names = stored_names(entry.path)
    assert not any("reference" in name or "helper" in name for name in names)


@pytest.mark.parametrize("is_lora", [False, True])
def test_the_teacher_stays_at_home(is_lora: bool, inputs: dict[str, Any], tmp_path: Path) -> None:
    """P64: the teacher travels in the checkpoint."""
    teacher = write_tiny_llm(tmp_path / "teacher", seed=5)
    before = (teacher / "model.safetensors").read_bytes()
    recipe = "lora_kd" if is_lora else "kd"
    values = values_of(inputs, **{"teacher.path": teacher, "export.at_end": "true"})
    values |= LORA if is_lora else {}
    assert run_sft(tmp_path / "out", values, ranks=2, recipe=recipe) == [0, 0]
    alone = values_of(inputs, **(LORA if is_lora else {}))
    assert run_sft(tmp_path / "alone", alone, ranks=2) == [0, 0]
    entries = [Catalog(tmp_path / each / "checkpoints").latest() for each in ("out", "alone")]
    names = [stored_names(entry.path) for entry in entries if entry is not None]
    assert names[0] == names[1], "the student's, and nothing else"
    assert (teacher / "model.safetensors").read_bytes() == before
    if not is_lora:
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "export" / "final")


def test_another_teacher_is_refused_on_resumption(
    inputs: dict[str, Any], tmp_path: Path, capfd: Any
) -> None:
    first, second = (write_tiny_llm(tmp_path / f"teacher-{seed}", seed=seed) for seed in (5, 6))
    values = values_of(inputs, **{"teacher.path": first})
    assert run_sft(tmp_path / "out", values, recipe="kd") == [0]
    values |= {"teacher.path": second, "epochs": 3}
    assert run_sft(tmp_path / "out", values, recipe="kd") == [BAD_INPUT]
    assert "content of teacher" in capfd.readouterr().out


def stored_names(path: Path) -> set[str]:
    """Of all that a checkpoint's weights hold."""
    return {*dcp.FileSystemReader(path / "weights").read_metadata().state_dict_metadata}
