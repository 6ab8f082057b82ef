"""What the recipe exports, while it trains and at its end, is what stock transformers loads."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sft_runs import TOKENIZER, make_inputs, run_sft
from transformers import AutoModelForCausalLM, AutoTokenizer

from backstay import Checkpointer, SaveEvent, TrainState, restore
from backstay.interop.hf import Exporter, ExportOptions, export_checkpoint
from backstay.testing.tiny_llm import write_tiny_llm
from backstay.training.exports import ExportConfig, export_when_committed, prune_exports


@pytest.fixture(scope="module")
def run(tmp_path_factory: Any) -> Path:
    """A finished run on two ranks that exported every second step, and at the end."""
    home = tmp_path_factory.mktemp("exports")
    values = {
        **make_inputs(home),
        "data.packing": "false",
        "epochs": 1,
        "checkpoint.keep_last": "null",
        "export.every_steps": 2,
        "export.at_end": "true",
    }
    assert run_sft(home / "out", values, ranks=2) == [0, 0]
    return home / "out"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_exported_model_computes_what_the_trained_one_computes(run: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(run / "export" / "final").eval()
    trained = AutoModelForCausalLM.from_config(loaded.config).eval()
    restore(run / "checkpoints", TrainState(model=trained), only=("model",))
    ids = torch.tensor([TOKENIZER.encode("what the birch said")])
    assert torch.equal(loaded(ids).logits, trained(ids).logits)
    assert AutoTokenizer.from_pretrained(run / "export" / "final").chat_template is not None


def test_exports_while_training_equal_those_of_their_checkpoints(run: Path, tmp_path: Path) -> None:
    found = sorted(path.name for path in (run / "export").glob("step-*"))
    assert found == ["step-00000002", "step-00000004", "step-00000005"]
    for name in found:
        export_checkpoint(run / "checkpoints" / name, tmp_path / name)
        assert files_of(tmp_path / name) == files_of(run / "export" / name)
    assert (run / "export" / "final").resolve().name == "step-00000005"


def test_a_sharded_export_loads_and_says_where_everything_is(run: Path, tmp_path: Path) -> None:
    options = ExportOptions(max_shard_bytes=20_000)
    export_checkpoint(run / "checkpoints" / "step-00000005", tmp_path / "few", options=options)
    index = json.loads((tmp_path / "few" / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) >= 3
    whole = AutoModelForCausalLM.from_pretrained(run / "export" / "final").state_dict()
    parts = AutoModelForCausalLM.from_pretrained(tmp_path / "few").state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_an_export_costs_the_loop_a_few_milliseconds(tmp_path: Path) -> None:
    """Measured where it happens: between the end of a save and whoever waits for it."""
    write_tiny_llm(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    exporter = Exporter(tmp_path / "export", companions=tmp_path / "model")
    real = export_when_committed(exporter, ExportConfig(every_steps=1), tmp_path / "checkpoints")
    seconds = []

    def timed(event: SaveEvent) -> None:
        began = time.perf_counter()
        real(event)
        seconds.append(time.perf_counter() - began)

    with Checkpointer(tmp_path / "checkpoints", TrainState(model=model), on_event=timed) as ours:
        for step in (1, 2, 3, 4, 5):
            ours.save(step)
    exporter.wait(60)
    assert len([*(tmp_path / "export").glob("step-*")]) == 5
    # The median of five on a busy machine; 5 ms is the promise.
    assert math.isfinite(seconds[0])
    assert sorted(seconds)[2] < 0.005


def test_only_exports_are_pruned_and_never_the_final_one(tmp_path: Path) -> None:
    for name in ("step-00000001", "step-00000002", "step-00000003", "step_notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "final").symlink_to("step-00000001")
    prune_exports(tmp_path, 2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["final", "step-00000001", "step-00000003", "step_notes"]
