"""Every checkpoint of a LoRA run is a peft adapter as well, made by the writer."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from sft_runs import TOKENIZER, make_inputs, run_sft
from transformers import AutoModelForCausalLM

from backstay import Catalog, TrainState, restore
from backstay.training.lora import LoraConfig, add_adapters


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_stock_peft_loads_the_adapter_of_every_checkpoint(tmp_path: Path, dora: bool) -> None:
    values: dict[str, Any] = {**make_inputs(tmp_path), "data.packing": "false", "lora.rank": 3}
    values |= {"lora.dora": str(dora).lower(), "max_steps": 4}
    out = tmp_path / "out"
    assert run_sft(out, values, ranks=2) == [0, 0]
    entries = Catalog(out / "checkpoints").list()
    assert entries
    ids = torch.tensor([TOKENIZER.encode("what the birch said")])
    for entry in entries:
        assert entry.problems("full") == []
        trained = AutoModelForCausalLM.from_pretrained(values["model.path"])
        add_adapters(trained, LoraConfig(rank=3, dora=dora))
        state = TrainState(model=trained)
        restore(out / "checkpoints", state, step=entry.step, only=("model",), strict=False)
        base = AutoModelForCausalLM.from_pretrained(values["model.path"])
        plain = base.eval()(ids).logits
        loaded = peft.PeftModel.from_pretrained(base, entry.path / "adapter").eval()
        assert torch.equal(loaded(ids).logits, trained.eval()(ids).logits)
        assert not torch.equal(loaded(ids).logits, plain)
        weights = entry.path / "adapter" / "adapter_model.safetensors"
        raw = bytearray(weights.read_bytes())
        raw[-1] ^= 1
        weights.write_bytes(raw)
        assert "adapter/adapter_model.safetensors" in entry.problems("full")[0]
