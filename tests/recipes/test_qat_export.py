"""Training for quantisation pays: the quantised export of such a run is better than the quantised model of a run without, and as good as it was in training."""

from pathlib import Path
from typing import Any

import torch
from sft_runs import TOKENIZER, make_inputs, records, run_sft
from torch import nn
from transformers import AutoModelForCausalLM

from backstay.interop.quantized import load_quantized
from backstay.testing.tiny_llm import chat
from backstay.training.exports import export_quantized
from backstay.training.qat import QatConfig

NUM_CHATS = 16
# Of the loss on the same data, in training (fake-quantised) and by the quantised model: another order of additions, over 20 chats.
BOUND = 1e-3
QAT: dict[str, Any] = {"qat.scheme": "int8_dynamic_int4", "qat.group_size": 32}


def test_a_quantised_model_is_better_if_trained_for_it(tmp_path: Path) -> None:
    values = {
        **make_inputs(tmp_path, num_sequences=NUM_CHATS, attention_dropout=0.0),
        "data.eval": tmp_path / "train.jsonl",
        "data.packing": "false",
        "checkpoint.every_steps": 1000,
        "export.at_end": "true",
    }
    assert run_sft(tmp_path / "learnt", {**values, "epochs": 40}) == [0]
    values["model.path"] = tmp_path / "learnt" / "export" / "final"
    values |= {"epochs": 6, "optimizer.lr": 0.003}
    assert run_sft(tmp_path / "plain", values) == [0]
    assert run_sft(tmp_path / "qat", {**values, **QAT}) == [0]
    (found,) = (tmp_path / "qat" / "export" / "quantized").glob("step-*")
    config = QatConfig(scheme="int8_dynamic_int4", group_size=32)
    afterwards = tmp_path / "afterwards"
    plain = tmp_path / "plain"
    export_quantized(
        plain / "export" / "final", afterwards, qat=config, companions=plain / "companions"
    )
    with_training, without = (mean_loss(load_quantized(each)) for each in (found, afterwards))
    last = max(records(tmp_path / "qat"))
    assert abs(with_training - records(tmp_path / "qat")[last]["eval_loss"]) < BOUND
    full = mean_loss(AutoModelForCausalLM.from_pretrained(plain / "export" / "final"))
    print(
        f"plain {full:.4f}, quantised afterwards {without:.4f}, trained for it {with_training:.4f}"
    )
    assert with_training < without


@torch.no_grad()
def mean_loss(model: nn.Module) -> float:
    """Of what the assistant says, by an independent computation."""
    model.eval()
    total, count = 0.0, 0
    for number in range(NUM_CHATS):
        messages = chat(number)
        whole = TOKENIZER.apply_chat_template(messages, tokenize=True)["input_ids"]
        prompt = TOKENIZER.apply_chat_template(
            messages[:1], tokenize=True, add_generation_prompt=True
        )["input_ids"]
        ids = torch.tensor([whole])
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        total += nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        count += len(whole) - len(prompt)
    return total / count
