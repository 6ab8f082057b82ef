"""Quantised models on disk: a fresh process and the stock loader compute what this one does."""

import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from backstay.interop.quantized import load_quantized, quantized_state, write_quantized
from backstay.testing.tiny_llm import write_tiny_llm
from backstay.training.qat import QatConfig, add_fake_quantization

CODE = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
from backstay.interop.quantized import load_quantized
model = load_quantized(Path(sys.argv[1]))
save_file({"logits": model(torch.arange(3, 30)[None]).logits}, sys.argv[2])
"""


def test_a_fresh_process_computes_what_the_fake_quantised_model_does(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source = write_tiny_llm(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    config = QatConfig(scheme="int8_dynamic_int4")
    ids = torch.arange(3, 30)[None]
    plain = model(ids).logits
    tensors = quantized_state(model, config.for_torchao(), ["lm_head"])
    write_quantized(
        tmp_path / "quantized",
        tensors,
        scheme=config.for_torchao(),
        companions=source,
        skipped=["lm_head"],
    )
    add_fake_quantization(model, config)
    wanted = model(ids).logits
    assert not torch.equal(wanted, plain)
    assert torch.equal(load_quantized(tmp_path / "quantized")(ids).logits, wanted)
    out = tmp_path / "logits.safetensors"
    command = [sys.executable, "-c", CODE, str(tmp_path / "quantized"), str(out)]
    subprocess.run(command, check=True, timeout=60)
    assert torch.equal(load_file(out)["logits"], wanted)
