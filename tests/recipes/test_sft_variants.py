"""Other models, data and ways to compute: each is resumed bit for bit, too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from sft_runs import Stop, final_state, make_inputs, records, run_sft
from tiny_gguf import write_tiny_gguf

from backstay.testing.tiny_llm import write_chats, write_tiny_llm
from backstay.training.signals import STOPPED

VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "mixed-precision-recomputed": (
        2,
        {"parallel.precision": "bfloat16", "parallel.activation_checkpointing": "true"},
    ),
    "bfloat16-weights": (2, {"model.dtype": "bfloat16"}),
    "hsdp": (4, {"parallel.replicas": 2}),
    "gathered-weights-kept": (2, {"parallel.reshard_after_forward": "false"}),
    "one-rank-bfloat16": (1, {"parallel.precision": "bfloat16"}),
}


def stop_and_go_on(out: Path, values: dict[str, Any], ranks: int) -> None:
    """Three updates, a stop in the middle of the fourth if it has several passes, and the rest."""
    passes = 4 // ranks
    assert set(run_sft(out, values, ranks=ranks, stop=Stop(3 * passes))) == {STOPPED}
    assert set(run_sft(out, values, ranks=ranks)) == {0}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_is_the_untouched_run_however_it_computes(name: str, tmp_path: Path) -> None:
    ranks, changes = VARIANTS[name]
    values = {**make_inputs(tmp_path), "data.packing": "false", "epochs": 1, **changes}
    assert set(run_sft(tmp_path / "untouched", values, ranks=ranks)) == {0}
    stop_and_go_on(tmp_path / "out", values, ranks)
    assert records(tmp_path / "out") == records(tmp_path / "untouched")
    assert final_state(tmp_path / "out") == final_state(tmp_path / "untouched")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_is_resumed_and_its_checkpoint_fits_one_that_is_not(
    tmp_path: Path,
) -> None:
    values = {**make_inputs(tmp_path), "data.packing": "false", "epochs": 1}
    compiled = {**values, "parallel.compile": "true"}
    assert run_sft(tmp_path / "out", compiled, stop=Stop(4 * 2), timeout_s=110) == [STOPPED]
    assert run_sft(tmp_path / "out", values) == [0]
    assert [*records(tmp_path / "out")] == [1, 2, 3, 4, 5]


def test_a_gguf_file_is_converted_once_and_trained(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file)
    changes = {"data.use_template": "false", "data.seq_len": 60, "epochs": 1, "batch_size": 2}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a b", "completion": "c d"}\n' * 6)
    values = {**inputs, "model.path": file, "data.train": rows, "data.packing": "false", **changes}
    assert run_sft(tmp_path / "out", values, stop=Stop(2)) == [STOPPED]
    (base,) = (tmp_path / "out").glob("base-*")
    stamp = (base / "model.safetensors").stat().st_mtime_ns
    assert run_sft(tmp_path / "out", values) == [0]
    assert (base / "model.safetensors").stat().st_mtime_ns == stamp
    assert [*records(tmp_path / "out")] == [1, 2, 3]


def test_several_data_sets_come_as_often_as_their_weights_say(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    files = [write_chats(tmp_path / f"{n}.jsonl", n, seed=n) for n in (8, 12)]
    values = {**inputs, "data.train": f"[{files[0]},{files[1]}]", "data.weights": "[1,0.5]"}
    values |= {"data.packing": "false", "batch_size": 2, "epochs": 2}
    assert run_sft(tmp_path / "untouched", values) == [0]
    taken = [s for record in records(tmp_path / "untouched").values() for s in record["samples"]]
    assert sorted(taken) == sorted([*range(8), *range(8), *range(8, 20)])
    stop_and_go_on(tmp_path / "out", {**values, "batch_size": 4}, 1)


def test_another_architecture(tmp_path: Path) -> None:
    values = {**make_inputs(tmp_path), "epochs": 1}
    write_tiny_llm(tmp_path / "qwen", model_type="qwen3", head_dim=8)
    assert run_sft(tmp_path / "out", {**values, "model.path": tmp_path / "qwen"}, ranks=2) == [0, 0]
