"""Exports by several ranks: sharded models, and failures while the others gather."""

import errno
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_exports import assert_loads_as, content, export, tensors, tiny_config, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from backstay import Checkpointer, TrainState
from backstay.coordination import Coordination
from backstay.errors import BackstayError, InvalidArgument
from backstay.interop import hf_model
from backstay.interop.hf import ExportOptions, export_checkpoint, export_model, save_companions
from backstay.testing import run_ranks

OPTIONS = ExportOptions(dtype="bfloat16", keep_dtype=("*norm*",), max_shard_bytes=30_000)


def sharded(model: Any, **mesh: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, **mesh)
    return fully_shard(model, **mesh)


def export_sharded(rank: int, world_size: int, folder: Path, model_type: str) -> None:
    model = sharded(tiny_model(model_type, tie_word_embeddings=True))
    before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    ranks = Coordination(timeout_s=30)
    for name, options in (("plain", ExportOptions()), ("split", OPTIONS)):
        out = folder / f"sharded-{name}"
        export_model(model, out, companions=folder / "companions", options=options, ranks=ranks)
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_local(), before[name])
    with Checkpointer(folder / "checkpoints", TrainState(model=model)) as checkpointer:
        checkpointer.save(1)


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_two_ranks_one_process_and_a_checkpoint_give_the_same_bytes(
    tmp_path: Path, model_type: str
) -> None:
    model = tiny_model(model_type, tie_word_embeddings=True)
    save_companions(tmp_path / "companions", config=model.config)
    run_ranks(2, export_sharded, tmp_path, model_type)
    for name, options in (("plain", ExportOptions()), ("split", OPTIONS)):
        out = export_checkpoint(
            tmp_path / "checkpoints/step-00000001", tmp_path / f"stored-{name}", options=options
        )
        expected = content(out)
        assert content(tmp_path / f"sharded-{name}") == expected
        alone = export_model(
            model,
            tmp_path / f"alone-{name}",
            companions=tmp_path / "companions",
            options=options,
            ranks=Coordination(timeout_s=10),
        )
        assert content(alone) == expected
    assert_loads_as(model, tmp_path / "sharded-plain")


def export_hybrid(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(tiny_model(num_hidden_layers=1), mesh=mesh)
    export_model(
        model,
        folder / "out",
        companions=folder / "companions",
        ranks=Coordination(timeout_s=30),
    )


def test_a_hybrid_sharded_model_is_exported_whole(tmp_path: Path) -> None:
    save_companions(tmp_path / "companions", config=tiny_config(num_hidden_layers=1))
    run_ranks(4, export_hybrid, tmp_path)
    assert_loads_as(tiny_model(num_hidden_layers=1), tmp_path / "out")


def export_onto_a_full_disk(rank: int, world_size: int, folder: Path) -> str:
    # The others learn of the failure in the middle, not only at the end.
    hf_model.AGREE_BYTES = 10_000
    model = sharded(tiny_model())
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    ranks = Coordination(timeout_s=30)
    out, companions = folder / "exports/out", folder / "companions"
    with pytest.raises(BackstayError) as caught:
        export_model(model, out, companions=companions, ranks=ranks)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert [*(folder / "exports").iterdir()] == []
    export_model(model, out, companions=companions, ranks=ranks)
    return str(caught.value)


def test_a_failing_disk_of_one_rank_is_an_error_on_all_and_the_next_export_works(
    tmp_path: Path,
) -> None:
    save_companions(tmp_path / "companions", config=tiny_config())
    found = run_ranks(2, export_onto_a_full_disk, tmp_path)
    assert len({*found}) == 1
    assert "rank 0: OSError" in found[0]
    assert "model.safetensors" in found[0]
    assert f"[Errno {errno.EFBIG}]" in found[0]
    assert_loads_as(tiny_model(), tmp_path / "exports/out")


def export_what_cannot_be(rank: int, world_size: int, folder: Path) -> list[str]:
    ranks = Coordination(timeout_s=30)
    found = []
    for kind in ("missing", "exists", "differs", "hook"):
        model = tiny_model(vocab_size=64 if kind == "differs" and rank == 1 else 128)
        if kind == "hook" and rank == 1:
            model.register_state_dict_pre_hook(fail)
        companions = folder / ("nowhere" if kind == "missing" else "companions")
        out = folder if kind == "exists" else folder / kind
        with pytest.raises(BackstayError) as caught:
            export_model(model, out, companions=companions, ranks=ranks)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def fail(*_: object) -> None:
    raise ZeroDivisionError("of the user")


def test_what_is_refused_is_refused_on_all_ranks(tmp_path: Path) -> None:
    save_companions(tmp_path / "companions", config=tiny_config())
    for found in run_ranks(2, export_what_cannot_be, tmp_path):
        assert found[0].startswith("ModelError")
        assert "config.json is missing" in found[0]
        assert found[1].startswith(InvalidArgument.__name__)
        assert found[2].startswith("RanksDisagree")
        assert "rank 1: ZeroDivisionError: of the user" in found[3]
    assert {path.name for path in tmp_path.iterdir()} == {"companions"}


def test_a_compiled_model_has_the_names_of_a_plain_one(tmp_path: Path) -> None:
    model = tiny_model()
    out = export(model, tmp_path / "plain")
    compiled = export(torch.compile(model), tmp_path / "compiled")
    assert content(compiled) == content(out)
    assert "lm_head.weight" in tensors(out)
