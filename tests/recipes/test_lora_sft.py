"""Adapters: resumed bit for bit, a few bytes per save, the base untouched, and stock peft loads the result."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
from sft_runs import TOKENIZER, Stop, final_state, make_inputs, records, run_sft
from transformers import AutoModelForCausalLM

from backstay import Catalog, TrainState, restore
from backstay.testing.tiny_llm import write_tiny_llm
from backstay.training.lora import LoraConfig, add_adapters, collect_adapter
from backstay.training.runtime import BAD_INPUT
from backstay.training.signals import STOPPED


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    """A run of adapters on two ranks that nobody stopped."""
    home = tmp_path_factory.mktemp("lora")
    values = {
        **make_inputs(home),
        "data.packing": "false",
        "lora.rank": 4,
        "lora.dropout": 0.1,
        "export.at_end": "true",
    }
    assert run_sft(home / "out", values, ranks=2) == [0, 0]
    return home / "out", values


def test_a_resumed_run_is_the_untouched_run(
    untouched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    reference, values = untouched
    out = tmp_path / "out"
    assert run_sft(out, values, ranks=2, stop=Stop(2 * 3)) == [STOPPED, STOPPED]
    assert run_sft(out, values, ranks=2) == [0, 0]
    assert records(out) == records(reference)
    assert final_state(out) == final_state(reference)
    loss = [record["loss"] for record in records(reference).values()]
    assert loss[-1] < loss[0]


def test_a_save_costs_adapters_and_their_optimizer_state(
    untouched: tuple[Path, dict[str, Any]],
) -> None:
    out, values = untouched
    model = AutoModelForCausalLM.from_pretrained(values["model.path"])
    add_adapters(model, LoraConfig(rank=4))
    num_bytes = sum(3 * p.nbytes for p in model.parameters() if p.requires_grad)
    latest = Catalog(out / "checkpoints").latest()
    assert latest is not None
    assert latest.manifest.base
    stored = dcp.FileSystemReader(latest.path / "weights").read_metadata().state_dict_metadata
    tensors = {name: each for name, each in stored.items() if hasattr(each, "properties")}
    assert all(".lora_" in name for name in tensors)
    written = sum(e.size.numel() * e.properties.dtype.itemsize for e in tensors.values())
    assert written <= 1.1 * num_bytes


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_stock_peft_loads_what_was_exported(untouched: tuple[Path, dict[str, Any]]) -> None:
    """P57: adapter-only save keeps rank 0's slice; two ranks trained this one."""
    out, values = untouched
    trained = AutoModelForCausalLM.from_pretrained(values["model.path"])
    add_adapters(trained, LoraConfig(rank=4))
    restore(out / "checkpoints", TrainState(model=trained), only=("model",), strict=False)
    base = AutoModelForCausalLM.from_pretrained(values["model.path"])
    (folder,) = (out / "export").glob("step-*/adapter")
    loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    ids = torch.tensor([TOKENIZER.encode("what the birch said")])
    assert torch.equal(loaded(ids).logits, trained.eval()(ids).logits)
    assert collect_adapter(trained).keys() == {
        f"base_model.model.{name.removeprefix('base_model.model.').replace('.default.', '.')}"
        for name, _ in loaded.named_parameters()
        if ".lora_" in name
    }
    assert any(value.any() for name, value in collect_adapter(trained).items() if "lora_B" in name)


def test_another_base_is_refused(
    untouched: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: Any
) -> None:
    out, values = untouched
    other = write_tiny_llm(tmp_path / "other", seed=1, attention_dropout=0.1)
    given = {**values, "model.path": other, "epochs": 3}
    assert run_sft(out, given, ranks=2) == [BAD_INPUT, BAD_INPUT]
    assert "made on frozen weights with fingerprint" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lora.targets": "no_such_layer"}, "lora.targets=['no_such_layer']"),
        ({"export.every_steps": 2}, "checkpoints of adapters hold no whole model"),
        ({"lora.rank": 0}, "lora.rank=0"),
    ],
)
def test_what_cannot_be_is_named(
    changes: dict[str, Any],
    expected: str,
    untouched: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    capfd: Any,
) -> None:
    assert run_sft(tmp_path / "out", {**untouched[1], **changes}) == [BAD_INPUT]
    assert expected in capfd.readouterr().out
