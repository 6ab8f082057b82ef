"""Exports of live models and of checkpoints in one process, opened by stock transformers."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_exports import (
    assert_loads_as,
    build,
    config_of,
    content,
    export,
    load,
    save_checkpoint,
    tensors,
    tiny_config,
    tiny_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from backstay.coordination import Coordination
from backstay.errors import InvalidArgument, ModelError, StateError, StateMismatch
from backstay.interop.hf import ExportOptions, export_checkpoint, export_model, save_companions
from backstay.testing.tiny_llm import CHAT_TEMPLATE, make_tokenizer


def save_stock(state: dict[str, Any], out: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=out)


def test_a_directory_has_all_that_stock_transformers_opens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    generation = GenerationConfig(eos_token_id=7, temperature=0.5, do_sample=True)
    companions = save_companions(
        tmp_path / "c", config=model.config, generation_config=generation, tokenizer=tokenizer
    )
    out = export_model(
        model, tmp_path / "out", companions=companions, ranks=Coordination(timeout_s=10)
    )
    assert_loads_as(model, out)
    loaded = AutoTokenizer.from_pretrained(out)
    assert loaded.encode("amber") == tokenizer.encode("amber")
    assert loaded.chat_template == CHAT_TEMPLATE
    assert load(out).generation_config.eos_token_id == 7
    assert {*content(out)} >= {"config.json", "generation_config.json", "model.safetensors"}


def test_what_is_written_is_what_save_pretrained_writes(tmp_path: Path) -> None:
    model = tiny_model()
    out = export(model, tmp_path / "out")
    model.save_pretrained(tmp_path / "stock")
    ours, stock = tensors(out), tensors(tmp_path / "stock")
    assert ours.keys() == stock.keys()
    assert all(torch.equal(ours[name], stock[name]) for name in ours)
    assert config_of(out) == config_of(tmp_path / "stock")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_get_the_names_that_the_stock_loader_knows(tmp_path: Path, model_type: str) -> None:
    model = tiny_model(model_type)
    out = export(model, tmp_path / "out", max_shard_bytes=20_000)
    assert any(".experts.3." in name for name in tensors(out))
    assert_loads_as(model, out)
    checkpoint = save_checkpoint(model, tmp_path / "run")
    again = export_checkpoint(
        checkpoint, tmp_path / "again", options=ExportOptions(max_shard_bytes=20_000)
    )
    assert content(again) == content(out)


def test_experts_are_cast_and_kept_by_their_names_in_the_model(tmp_path: Path) -> None:
    out = export(
        tiny_model("mixtral"), tmp_path / "out", dtype="bfloat16", keep_dtype=("*gate_up_proj",)
    )
    dtypes = {name.split(".")[-2]: tensor.dtype for name, tensor in tensors(out).items()}
    assert (dtypes["w1"], dtypes["w2"], dtypes["w3"]) == (
        torch.float32,
        torch.bfloat16,
        torch.float32,
    )


def test_checkpoint_and_live_model_give_the_same_bytes(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    checkpoint = save_checkpoint(model, tmp_path / "run")
    for options in ({}, {"dtype": "bfloat16", "max_shard_bytes": 10_000}):
        name = "-".join(options) or "plain"
        live = export(model, tmp_path / f"live-{name}", **options)
        stored = export_checkpoint(checkpoint, tmp_path / name, options=ExportOptions(**options))
        assert content(live) == content(stored)


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_stock_checkpoint_is_exported(tmp_path: Path, is_nested: bool, tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    state = {"model": model.state_dict(), "step": 3} if is_nested else model.state_dict()
    save_stock(state, tmp_path / "dcp")
    live = export(model, tmp_path / "live")
    out = export_checkpoint(
        tmp_path / "dcp", tmp_path / "out", companions=tmp_path / "live-companions"
    )
    assert content(out) == content(live)


def test_a_stock_checkpoint_without_the_companions_says_what_to_pass(tmp_path: Path) -> None:
    save_stock({"model": tiny_model().state_dict()}, tmp_path / "dcp")
    with pytest.raises(InvalidArgument, match=r"(?s)companions=DIR.*config\.json"):
        export_checkpoint(tmp_path / "dcp", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_directory_of_the_model_will_do_as_companions(tmp_path: Path) -> None:
    model = tiny_model(seed=1)
    tiny_model(seed=2).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    ranks = Coordination(timeout_s=10)
    out = export_model(model, tmp_path / "out", companions=tmp_path / "base", ranks=ranks)
    assert_loads_as(model, out)
    assert {*content(out)} == {"config.json", "generation_config.json", "model.safetensors"}


def test_weights_that_were_tied_and_are_not_any_more_are_both_written(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)
    out = export(model, tmp_path / "out")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= tensors(out).keys()
    # Else readers that believe the configuration would drop one.
    assert config_of(out)["tie_word_embeddings"] is False
    assert_loads_as(model, out)


def test_weights_tied_by_hand_are_written_under_both_names(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    out = export(model, tmp_path / "out")
    assert config_of(out)["tie_word_embeddings"] is False
    assert_loads_as(model, out)
    stored = export_checkpoint(save_checkpoint(model, tmp_path / "run"), tmp_path / "stored")
    assert content(stored) == content(out)


def test_eight_bit_floats_are_written_as_they_are(tmp_path: Path) -> None:
    model = tiny_model()
    weight = model.model.layers[0].mlp.up_proj.weight.detach().to(torch.float8_e4m3fn)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight)
    checkpoint = save_checkpoint(model, tmp_path / "run")
    out = export(model, tmp_path / "out")
    found = tensors(out)["model.layers.0.mlp.up_proj.weight"]
    assert found.dtype == torch.float8_e4m3fn
    assert torch.equal(found.view(torch.uint8), weight.view(torch.uint8))
    assert content(export_checkpoint(checkpoint, tmp_path / "stored")) == content(out)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp32"},
        {"dtype": ""},
        {"keep_dtype": "*.norm.weight"},
        {"keep_dtype": (3,)},
        {"max_shard_bytes": 0},
        {"max_shard_bytes": "5GB"},
        {"max_shard_bytes": True},
    ],
)
def test_options_that_cannot_be_used_are_refused_at_once(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        ExportOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_what_exists_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "directory":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to("nowhere")
    with pytest.raises(InvalidArgument, match=r"out exists.*never overwritten"):
        export(tiny_model(), out)
    with pytest.raises(InvalidArgument, match="never overwritten"):
        export_checkpoint(tmp_path, out, companions=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out-companions"}


def test_a_model_of_another_architecture_is_refused_with_all_differences(tmp_path: Path) -> None:
    save_companions(tmp_path / "c", config=tiny_config(num_hidden_layers=1, vocab_size=64))
    with pytest.raises(StateMismatch) as caught:
        export_model(
            tiny_model(),
            tmp_path / "out",
            companions=tmp_path / "c",
            ranks=Coordination(timeout_s=10),
        )
    assert "model.layers.1.mlp.up_proj.weight: unexpected" in str(caught.value)
    assert "model.embed_tokens.weight: shape (128, 32), expected (64, 32)" in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"c"}


def test_a_checkpoint_without_frozen_weights_names_what_is_missing(tmp_path: Path) -> None:
    save_stock({"model": {"lm_head.weight": torch.zeros(128, 32)}}, tmp_path / "dcp")
    save_companions(tmp_path / "c", config=tiny_config())
    with pytest.raises(StateMismatch, match=r"model\.norm\.weight: missing"):
        export_checkpoint(tmp_path / "dcp", tmp_path / "out", companions=tmp_path / "c")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "config.json is missing"),
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"model_type": "no-such"}', "cannot build the model"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "quantised"),
    ],
)
def test_companions_that_cannot_be_used_are_refused(
    tmp_path: Path, text: str | None, expected: str
) -> None:
    (tmp_path / "c").mkdir()
    if text is not None:
        (tmp_path / "c/config.json").write_text(text)
    with pytest.raises(ModelError, match=expected):
        export_model(
            tiny_model(),
            tmp_path / "out",
            companions=tmp_path / "c",
            ranks=Coordination(timeout_s=10),
        )
    assert {path.name for path in tmp_path.iterdir()} == {"c"}


def test_a_model_without_values_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config())
    with pytest.raises(StateError, match="meta device"):
        export(model, tmp_path / "out")


def test_a_failing_write_leaves_nothing(tmp_path: Path) -> None:
    model = tiny_model()
    companions = save_companions(tmp_path / "c", config=model.config)
    (companions / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        export_checkpoint(
            save_checkpoint(model, tmp_path / "run"), tmp_path / "e/out", companions=companions
        )
    assert [*(tmp_path / "e").iterdir()] == []


def test_companions_are_replaced_file_by_file(tmp_path: Path) -> None:
    save_companions(tmp_path / "c", config=tiny_config(vocab_size=64), tokenizer=make_tokenizer())
    (tmp_path / "c/LICENSE").write_text("mine")
    save_companions(tmp_path / "c", config=tiny_config())
    assert config_of(tmp_path / "c")["vocab_size"] == 128
    assert (tmp_path / "c/LICENSE").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    with pytest.raises(InvalidArgument, match="expected a transformers configuration"):
        save_companions(tmp_path / "c", config={"model_type": "llama"})  # type: ignore[arg-type]


def test_parts_of_a_model_get_the_dtype_that_was_written(tmp_path: Path) -> None:
    model = build(tiny_config("gemma3_text", head_dim=8))
    out = export(model, tmp_path / "out", dtype="bfloat16")
    assert config_of(out)["dtype"] == "bfloat16"
    loaded = load(out)
    assert loaded.dtype == torch.bfloat16
    expected = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name].to(torch.bfloat16))


MEASURE = """
import sys
from pathlib import Path
from backstay.interop.hf import export_checkpoint

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
export_checkpoint(sys.argv[1], sys.argv[2])
print((peak() - before) * 1024)
"""


def test_an_export_needs_far_less_memory_than_a_copy(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=13)
    num_bytes = sum(each.nbytes for each in model.parameters())
    assert num_bytes > 200e6
    checkpoint = save_checkpoint(model, tmp_path / "run")
    found = subprocess.run(
        [sys.executable, "-c", MEASURE, checkpoint, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    # What transformers loads when it is first used is part of it.
    assert int(found.stdout) < num_bytes * 0.8
    assert {*tensors(tmp_path / "out")} == {*model.state_dict()}
