"""Field cases of theme J (export), and the export's part of P25, P47 and P48."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_exports import (
    MixedConfig,
    assert_loads_as,
    build,
    config_of,
    content,
    export,
    load,
    tensors,
    tiny_config,
    tiny_model,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer

from backstay import Checkpointer, RetentionPolicy, SaveEvent, TrainState
from backstay.catalog import Catalog
from backstay.coordination import Coordination
from backstay.interop.hf import (
    Exporter,
    ExportOptions,
    export_checkpoint,
    export_model,
    save_companions,
)
from backstay.testing import run_ranks
from backstay.testing.tiny_llm import make_tokenizer


def test_p25_exports_have_limits_of_their_own(tmp_path: Path) -> None:
    """P25: exports fill the disk, or are counted as checkpoints."""
    model = tiny_model()
    companions = save_companions(tmp_path / "companions", config=model.config)
    (tmp_path / "run/step_notes").mkdir(parents=True)
    (tmp_path / "run/step_notes/mine").write_text("untouched")
    # The worst place: among the checkpoints.
    exporter = Exporter(tmp_path / "run/export", companions=companions)

    def on_event(event: SaveEvent) -> None:
        if event.step == 2:
            exporter.start(tmp_path / f"run/step-{event.step:08d}", event.step)

    state, keep = TrainState(model=model), RetentionPolicy(last=2)
    with Checkpointer(tmp_path / "run", state, keep=keep, on_event=on_event) as checkpointer:
        for step in range(1, 7):
            checkpointer.save(step)
    exporter.wait()
    assert [entry.step for entry in Catalog(tmp_path / "run").list()] == [5, 6]
    assert (tmp_path / "run/step_notes/mine").read_text() == "untouched"
    # Every export that was asked for stays, and nothing else does.
    assert [path.name for path in (tmp_path / "run/export").iterdir()] == ["step-00000002"]


def wrapped_exports(rank: int, world_size: int, folder: Path) -> None:
    ranks = Coordination(timeout_s=30)
    wrappers = ("compile", "checkpoint", "shard", "ddp")
    for size in (1, 2, 3):
        for order in itertools.permutations(wrappers, size):
            if {"shard", "ddp"} <= {*order}:
                continue
            model = wrap(tiny_model(num_hidden_layers=1), order)
            name = "-".join(order)
            export_model(model, folder / name, companions=folder / "companions", ranks=ranks)


def wrap(model: Any, order: tuple[str, ...]) -> Any:
    """Wrap the only layer, and for DDP the model."""
    layer = model.model.layers[0]
    for kind in order:
        if kind == "compile":
            layer = torch.compile(layer)
        elif kind == "checkpoint":
            layer = checkpoint_wrapper(layer)
        elif kind == "shard":
            layer = fully_shard(layer)
    model.model.layers[0] = layer
    return DistributedDataParallel(model) if "ddp" in order else model


def test_p47_wrappers_do_not_show_in_the_names(tmp_path: Path) -> None:
    """P47: nested wrappers leave their prefixes in names, and the plain model cannot load them."""
    config = tiny_config(num_hidden_layers=1)
    save_companions(tmp_path / "companions", config=config)
    plain = content(export(build(config), tmp_path / "plain"))
    run_ranks(1, wrapped_exports, tmp_path)
    found = [path for path in tmp_path.iterdir() if "companions" not in path.name]
    assert len(found) == 1 + 4 + 10 + 12
    for path in found:
        assert content(path) == plain, path.name


def export_tied(rank: int, world_size: int, folder: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    fully_shard(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    export_model(
        model,
        folder / "live",
        companions=folder / "companions",
        ranks=Coordination(timeout_s=30),
    )
    with Checkpointer(folder / "checkpoints", TrainState(model=model)) as checkpointer:
        checkpointer.save(1)


def test_p48_tied_embeddings_are_written_once_and_tied_again(tmp_path: Path) -> None:
    """P48: tied embeddings are written twice, or come back untied."""
    model = tiny_model(tie_word_embeddings=True)
    save_companions(tmp_path / "companions", config=model.config)
    run_ranks(2, export_tied, tmp_path)
    export_checkpoint(tmp_path / "checkpoints/step-00000001", tmp_path / "stored")
    for name in ("live", "stored"):
        assert "lm_head.weight" not in tensors(tmp_path / name)
        assert config_of(tmp_path / name)["tie_word_embeddings"] is True
        loaded = load(tmp_path / name)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert_loads_as(model, tmp_path / name)


def export_mixed(rank: int, world_size: int, folder: Path) -> None:
    model = fully_shard(build(MixedConfig(widths=(5, 64))))
    export_model(
        model,
        folder / "live",
        companions=folder / "companions",
        options=ExportOptions(dtype="bfloat16", max_shard_bytes=64),
        ranks=Coordination(timeout_s=30),
    )
    with Checkpointer(folder / "checkpoints", TrainState(model=model)) as checkpointer:
        checkpointer.save(1)


def test_p51_integer_and_boolean_buffers_are_exported_as_they_are(tmp_path: Path) -> None:
    """P51: one integer buffer makes the export fail at the very end, or is cast like a weight."""
    model = build(MixedConfig(widths=(5, 64)))
    save_companions(tmp_path / "companions", config=model.config)
    run_ranks(2, export_mixed, tmp_path)
    found = tensors(tmp_path / "live")
    state = model.state_dict()
    assert found.keys() == state.keys()
    for name, value in state.items():
        expected = value.to(torch.bfloat16) if value.is_floating_point() else value
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected), name
    assert found["counts"].dtype == torch.int64
    assert found["mask"].dtype == torch.bool
    options = ExportOptions(dtype="bfloat16", max_shard_bytes=64)
    export_checkpoint(tmp_path / "checkpoints/step-00000001", tmp_path / "stored", options=options)
    assert content(tmp_path / "stored") == content(tmp_path / "live")


def test_p52_files_and_index_hold_what_was_really_written(tmp_path: Path) -> None:
    """P52: the index of the original maps the tied head to a file that readers then reject."""
    model = tiny_model(tie_word_embeddings=True)
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    index = json.loads((tmp_path / "base/model.safetensors.index.json").read_text())
    assert "lm_head.weight" in index["weight_map"]
    model.config.save_pretrained(tmp_path / "base")
    out = export_model(
        model,
        tmp_path / "out",
        companions=tmp_path / "base",
        options=ExportOptions(max_shard_bytes=20_000),
        ranks=Coordination(timeout_s=10),
    )
    # `tensors` opens every file and compares with the index.
    assert tensors(out).keys() == {*model.state_dict()} - {"lm_head.weight"}
    assert_loads_as(model, out)


def export_in_three_files(rank: int, world_size: int, folder: Path) -> None:
    model = tiny_model(vocab_size=300)
    fully_shard(model)
    export_model(
        model,
        folder / "out",
        companions=folder / "companions",
        options=ExportOptions(max_shard_bytes=61_000),
        ranks=Coordination(timeout_s=30),
    )


def test_p53_an_export_opens_by_name_with_no_edits(tmp_path: Path) -> None:
    """P53: shards without their index, or without configuration and tokenizer."""
    model, tokenizer = tiny_model(vocab_size=300), make_tokenizer()
    save_companions(tmp_path / "companions", config=model.config, tokenizer=tokenizer)
    run_ranks(2, export_in_three_files, tmp_path)
    out = tmp_path / "out"
    assert len([*out.glob("model-0000?-of-00003.safetensors")]) == 3
    assert_loads_as(model, out)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert config_of(out)["architectures"] == ["LlamaForCausalLM"]
    assert config_of(out)["dtype"] == "float32"
    assert (out / "generation_config.json").exists()


@pytest.mark.parametrize("dtype", ["same", "float32", "bfloat16", "float16"])
def test_p54_each_tensor_has_the_dtype_that_was_asked_for(tmp_path: Path, dtype: str) -> None:
    """P54: float32 is taken for no conversion, and what must stay float32 is cast with the rest."""
    model = build(MixedConfig(widths=(5, 640))).to(torch.bfloat16)
    model.norm.weight = torch.nn.Parameter(torch.full((4,), 1.0001))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    out = export(model, tmp_path / "out", dtype=dtype, keep_dtype=("norm.weight",))
    found = tensors(out)
    for name, value in before.items():
        expected = value.dtype
        if value.is_floating_point() and name != "norm.weight" and dtype != "same":
            expected = getattr(torch, dtype)
        assert found[name].dtype == expected, name
        assert torch.equal(found[name], value.to(expected)), name
    assert config_of(out)["dtype"] == ("bfloat16" if dtype == "same" else dtype)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("widths", sorted({*itertools.permutations((1024, 25, 1024, 256))}))
def test_p55_every_tensor_is_in_exactly_one_file(tmp_path: Path, widths: tuple[int, ...]) -> None:
    """P55: a tensor larger than the budget of a file is not written."""
    model = build(MixedConfig(widths=widths))
    out = export(model, tmp_path / "out", max_shard_bytes=1024)
    found, state = tensors(out), model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) for name, value in state.items())
    for path in out.glob("*.safetensors"):
        inside = [name for name, file in weight_map(out).items() if file == path.name]
        assert len(inside) == 1 or sum(found[name].nbytes for name in inside) <= 1024
    loaded = load(out)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in state.items())


def weight_map(out: Path) -> dict[str, str]:
    """Which tensor is in which file."""
    return dict(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"])


def test_starting_an_export_takes_milliseconds(tmp_path: Path) -> None:
    """P25: what runs beside training must not stop it."""
    model = tiny_model()
    with Checkpointer(tmp_path / "c", TrainState(model=model)) as checkpointer:
        checkpointer.save(1)
    exporter = Exporter(tmp_path / "export", companions=tmp_path, timeout_s=0.01)
    began = time.perf_counter()
    exporter.start(tmp_path / "c/step-00000001", 1)
    assert time.perf_counter() - began < 0.05
    with pytest.raises(OSError, match="step 1 failed"):
        exporter.wait()
