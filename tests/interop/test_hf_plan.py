"""Where each tensor goes, and files of all dtypes as safetensors reads them."""

from pathlib import Path

import pytest
import torch
from hf_exports import tensors

from backstay.errors import ExportFailed, StateError
from backstay.interop.hf_file import TensorFiles, verify_files
from backstay.interop.hf_options import ExportOptions
from backstay.interop.hf_plan import DTYPE_NAMES, ExportPlan, Group, Spec, make_plan


def plan_of(specs: dict[str, Spec], **options: object) -> ExportPlan:
    groups = [Group((name,), ((name, spec),)) for name, spec in specs.items()]
    return make_plan(groups, ExportOptions(**options))  # type: ignore[arg-type]


def write(folder: Path, values: dict[str, torch.Tensor], **options: object) -> ExportPlan:
    specs = {name: Spec(value.dtype, tuple(value.shape)) for name, value in values.items()}
    plan = plan_of(specs, **options)
    files = TensorFiles(folder, plan)
    # Places do not depend on the order of writing.
    for name in reversed(values):
        files.write(name, values[name])
    files.check_complete()
    return plan


def random_values() -> dict[str, torch.Tensor]:
    """One tensor of each dtype and shape, odd sizes before wide dtypes."""
    values = {}
    shapes = [(3, 5), (), (0, 4), (1,)]
    for dtype in reversed(DTYPE_NAMES):
        for shape in shapes:
            count = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
            values[f"{dtype}-{len(values)}"] = raw.view(dtype).reshape(shape)
    return values


@pytest.mark.parametrize("max_shard_bytes", [1, 50, 10_000])
def test_all_dtypes_and_shapes_come_back(tmp_path: Path, max_shard_bytes: int) -> None:
    values = random_values()
    plan = write(tmp_path, values, max_shard_bytes=max_shard_bytes)
    if plan.index is not None:
        (tmp_path / "model.safetensors.index.json").write_bytes(plan.index)
    verify_files(tmp_path, plan)
    found = tensors(tmp_path)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(
            found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        )


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).view(3, 4)
    write(tmp_path, {"turned": matrix.t(), "part": matrix[1:, ::2]})
    found = tensors(tmp_path)
    assert torch.equal(found["turned"], matrix.t())
    assert torch.equal(found["part"], matrix[1:, ::2])


def test_nothing_at_all_is_one_empty_file(tmp_path: Path) -> None:
    plan = write(tmp_path, {})
    verify_files(tmp_path, plan)
    assert tensors(tmp_path) == {}


@pytest.mark.parametrize("damage", ["shorter", "longer", "name", "missing"])
def test_a_file_that_is_not_what_was_planned_is_found(tmp_path: Path, damage: str) -> None:
    plan = write(tmp_path, {"first": torch.zeros(4), "second": torch.ones(2)})
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    damaged = {
        "shorter": data[:-1],
        "longer": data + b"\0",
        "name": data.replace(b"second", b"xxxxxx"),
    }
    if damage == "missing":
        path.unlink()
        with pytest.raises(FileNotFoundError):
            verify_files(tmp_path, plan)
        return
    path.write_bytes(damaged[damage])
    with pytest.raises(ExportFailed, match="not what was planned"):
        verify_files(tmp_path, plan)


def test_a_tensor_is_written_once(tmp_path: Path) -> None:
    plan = plan_of({"one": Spec(torch.float32, (2,)), "two": Spec(torch.float32, (2,))})
    files = TensorFiles(tmp_path, plan)
    files.write("one", torch.zeros(2))
    with pytest.raises(AssertionError, match="written twice"):
        files.write("one", torch.zeros(2))
    with pytest.raises(AssertionError, match="not written: two"):
        files.check_complete()
    files.close()


def test_what_safetensors_cannot_hold_is_refused() -> None:
    with pytest.raises(StateError, match=r"x: safetensors has no dtype for torch\.complex128"):
        plan_of({"x": Spec(torch.complex128, (2,))})


def test_two_tensors_of_one_name_are_refused() -> None:
    spec = Spec(torch.float32, (2,))
    groups = [Group(("a",), (("x", spec),)), Group(("b",), (("x", spec),))]
    with pytest.raises(StateError, match="two tensors would be exported as x"):
        make_plan(groups, ExportOptions())
