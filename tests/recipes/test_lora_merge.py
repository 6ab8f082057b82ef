"""Merged exports: the base with its adapters in it, computed into a copy; loaded by stock transformers in a new process, it answers as the trained model does."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from sft_runs import TOKENIZER, make_inputs, run_sft
from torch import Tensor
from transformers import AutoModelForCausalLM

from backstay.interop.quantized import load_quantized
from backstay.testing.tiny_llm import write_tiny_llm
from backstay.training.lora import LoraConfig, add_adapters
from backstay.training.merge import merge_into

IDS = torch.tensor([TOKENIZER.encode("what the birch said")])
# Of logits around 1, in float32: the order of additions.
BOUND = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"lora.dora": "true"},
    "rslora": {"lora.rslora": "true"},
    "qat": {"qat.scheme": "int8_dynamic_int8"},
}


@pytest.fixture(scope="module", params=VARIANTS)
def finished(request: Any, tmp_path_factory: Any) -> tuple[Path, Path, str]:
    """Base and output of a run on two ranks with a merged export."""
    home = tmp_path_factory.mktemp(request.param)
    values = {
        **make_inputs(home, num_sequences=8),
        "data.eval": home / "eval.jsonl",
        "data.packing": "false",
        "lora.rank": 4,
        "optimizer.lr": 0.03,
        "export.at_end": "true",
        "export.merged": "true",
        **VARIANTS[request.param],
    }
    assert run_sft(home / "out", values, ranks=2) == [0, 0]
    return home / "model", home / "out", request.param


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_merged_answers_as_the_adapters_do(
    finished: tuple[Path, Path, str], tmp_path: Path
) -> None:
    home, out, _ = finished
    base = AutoModelForCausalLM.from_pretrained(home).eval()
    plain_logits = base(IDS).logits
    (folder,) = (out / "export").glob("step-*/adapter")
    expected = peft.PeftModel.from_pretrained(base, folder).eval()(IDS).logits
    found = logits_in_new_process(out / "export" / "merged" / "final", tmp_path)
    assert (found - expected).abs().max() < BOUND
    assert (found - plain_logits).abs().max() > 100 * BOUND, "the adapters do something"


def test_a_quantised_model_keeps_what_was_merged(finished: tuple[Path, Path, str]) -> None:
    """P66: LoRA merged into a still-quantised base disappears."""
    home, out, name = finished
    if name != "qat":
        assert not (out / "export" / "merged" / "quantized").exists()
        return
    (folder,) = (out / "export" / "merged" / "quantized").glob("step-*")
    quantized = load_quantized(folder)(IDS).logits
    merged, base = (
        AutoModelForCausalLM.from_pretrained(path).eval()(IDS).logits
        for path in (out / "export" / "merged" / "final", home)
    )
    rounding = (quantized - merged).abs().max()
    assert 0 < rounding < (merged - base).abs().max() / 4


def logits_in_new_process(model: Path, tmp_path: Path) -> Tensor:
    """What a stock model says."""
    program = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A; "
        "torch.save(A.from_pretrained(sys.argv[1]).eval()(torch.tensor([eval(sys.argv[2])])).logits.detach(), sys.argv[3])"
    )
    file = tmp_path / "logits.pt"
    subprocess.run(
        [sys.executable, "-c", program, str(model), str(IDS[0].tolist()), str(file)], check=True
    )
    found: Tensor = torch.load(file, weights_only=True)
    return found


def test_merging_again_is_the_same_and_wears_nothing_down(tmp_path: Path) -> None:
    """P56: merging twice adds the delta twice. P60: merge and unmerge wears the weights down in bf16."""
    write_tiny_llm(tmp_path / "model")
    trained, plain = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
        for _ in range(2)
    )
    add_adapters(trained, LoraConfig(rank=4))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trained.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    merged = None
    for _ in range(50):
        merge_into(plain, trained)
        values = {name: value.clone() for name, value in plain.state_dict().items()}
        assert merged is None or all(torch.equal(values[name], merged[name]) for name in merged)
        merged = values
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    layer = trained.model.layers[0].self_attn.q_proj
    factor = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
    expected = layer.base_layer.weight.float() + 16 / 4 * factor
    found = plain.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(found, expected.bfloat16())
