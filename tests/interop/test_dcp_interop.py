"""Our storage writer and reader inside stock DCP: bit-equal both ways, published whole or not at all, and nothing foreign is run."""

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import DTYPES, seed_all, train_state
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from backstay import Catalog, Checkpointer, TrainState, restore
from backstay.attempts import hold_lock
from backstay.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    InvalidArgument,
    RanksDisagree,
    SaveFailed,
    StateError,
    StepExists,
)
from backstay.interop.dcp import BackstayReader, BackstayWriter
from backstay.testing import fail_at, inject, run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.models import Training, make_training, train_step

# One parameter never gets a gradient, so stock has no state for it.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True, strict=False)


def trained(num_steps: int = 2) -> Training:
    """A sharded training some steps old."""
    seed_all(dist.get_rank())
    training = make_training("fsdp2")
    for _ in range(num_steps):
        train_step(training)
    return training


def bytes_of(training: Training) -> dict[str, str]:
    """All values but the buffer that differs between ranks by its nature."""
    found = state_bytes(training.model, training.optimizers)
    found.pop("running_mean", None)
    return found


def state_of(training: Training) -> dict[str, Any]:
    model, optimizer = get_state_dict(training.model, training.optimizers, options=OPTIONS)
    return {"model": model, "optimizer": optimizer}


def load_state(training: Training, state: dict[str, Any]) -> None:
    set_state_dict(
        training.model,
        training.optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=OPTIONS,
    )


def save_alone(state: dict[str, Any], writer: Any, **options: Any) -> None:
    """`dcp.save` without a process group, about which stock warns."""
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(state, storage_writer=writer, **options)


def load_alone(state: dict[str, Any], reader: Any, **options: Any) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, storage_reader=reader, **options)


def failures(fn: Callable[[], object]) -> dict[int, BaseException]:
    """What each rank failed with, as stock tells it to this one."""
    with pytest.raises(CheckpointException) as caught:
        fn()
    return {rank: error for rank, (error, _) in caught.value.failures.items()}


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# Both ways, on any number of ranks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ours_and_stock_load_each_other_on_any_number_of_ranks(
    tmp_path: Path, num_ranks: int
) -> None:
    before = run_ranks(num_ranks, save_all, tmp_path)[0]
    for other in {num_ranks, num_ranks % 3 + 1}:
        for loaded in run_ranks(other, load_all, tmp_path):
            for source in loaded:
                assert_bit_equal(before, loaded[source])


def save_all(rank: int, world_size: int, root: Path) -> dict[str, str]:
    training = trained()
    state = state_of(training)
    dcp.save(state, storage_writer=BackstayWriter(root / "ours"))
    dcp.save(state, checkpoint_id=root / "stock")
    with Checkpointer(root / "run", train_state(training)) as checkpointer:
        checkpointer.save(2)
    return bytes_of(training)


def load_all(rank: int, world_size: int, root: Path) -> dict[str, dict[str, str]]:
    readers = {
        "ours, by stock": dcp.FileSystemReader(root / "ours"),
        "ours, by ours": BackstayReader(root / "ours", verify="full"),
        "stock, by ours": BackstayReader(root / "stock"),
        "the checkpointer's, by ours": BackstayReader(root / "run" / "step-00000002"),
        "its weights, by ours": BackstayReader(
            root / "run" / "step-00000002" / "weights", verify="full"
        ),
    }
    found = {}
    for name, reader in readers.items():
        training = trained(num_steps=1)
        state = state_of(training)
        dcp.load(state, storage_reader=reader)
        load_state(training, state)
        found[name] = bytes_of(training)
    training = trained(num_steps=1)
    restore(root / "ours", train_state(training), only=("model", "optimizer"))
    found["ours, by restore"] = bytes_of(training)
    return found


def test_a_part_of_the_state_can_be_loaded(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": torch.ones(3), "n": 7}
    save_alone(state, BackstayWriter(tmp_path / "one"))
    part = {"a": torch.zeros(6)}
    load_alone(part, BackstayReader(tmp_path / "one"))
    assert torch.equal(part["a"], state["a"])


# Values ----------------------------------------------------------------------------------------------------------------


def test_every_dtype_comes_back_through_both_readers(tmp_path: Path) -> None:
    state = zoo(0)
    save_alone(state, BackstayWriter(tmp_path / "one", chunk_bytes=4096))
    for reader in (BackstayReader(tmp_path / "one"), dcp.FileSystemReader(tmp_path / "one")):
        loaded = zoo(100)
        load_alone(loaded, reader)
        for name, value in state.items():
            assert loaded[name].dtype == value.dtype
            assert bits(loaded[name]) == bits(value), name


def zoo(seed: int) -> dict[str, Tensor]:
    """Every dtype in several shapes, and views that are no plain rows of memory."""
    found = {
        f"{dtype}-{number}": random_bits(shape, dtype, seed + number)
        for dtype in DTYPES
        for number, shape in enumerate([(), (0, 4), (7,), (3, 5)])
    }
    found["transposed"] = random_bits((4, 6), torch.float32, seed).t()
    found["strided"] = random_bits((40, 50), torch.int16, seed)[::2, 3:20]
    found["expanded"] = random_bits((1, 5), torch.uint8, seed).expand(3, 5).clone()
    found["large"] = random_bits((300, 1000), torch.float32, seed)
    return found


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern that the dtype admits."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_conjugate_and_negative_views_are_stored_as_what_they_show(tmp_path: Path) -> None:
    values = torch.complex(torch.arange(4.0), torch.ones(4))
    state = {"conj": values.conj(), "neg": values.conj().imag}
    save_alone(state, BackstayWriter(tmp_path / "one"))
    loaded = {"conj": torch.zeros(4, dtype=torch.complex64), "neg": torch.zeros(4)}
    load_alone(loaded, BackstayReader(tmp_path / "one"))
    assert torch.equal(loaded["conj"], state["conj"].resolve_conj())
    assert torch.equal(loaded["neg"], torch.full((4,), -1.0))


OBJECTS = {
    "progress": {"step": 3, "epoch": 1.5, "name": "run", "done": False, "none": None},
    "rows": [1, [2, 3], {"inner": torch.arange(3)}],
    "raw": b"\x00\xff",
}


@pytest.mark.parametrize("is_ours", [True, False])
def test_objects_come_back_through_both_readers(tmp_path: Path, is_ours: bool) -> None:
    path = tmp_path / "one"
    save_alone(OBJECTS, BackstayWriter(path) if is_ours else dcp.FileSystemWriter(path))
    for reader in (BackstayReader(path), dcp.FileSystemReader(path)):
        loaded: dict[str, Any] = {
            "progress": dict.fromkeys(OBJECTS["progress"]),
            "rows": [0, [0, 0], {"inner": torch.zeros(3, dtype=torch.int64)}],
            "raw": b"",
        }
        load_alone(loaded, reader)
        assert repr(loaded) == repr(OBJECTS)


def test_a_tensor_subclass_is_stored_by_its_whole_frame(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    state = {"two": TwoTensor(torch.arange(4.0), torch.arange(4.0) + 10), "one": torch.ones(3)}
    save_alone(state, BackstayWriter(tmp_path / "one"))
    for reader in (BackstayReader(tmp_path / "one"), dcp.FileSystemReader(tmp_path / "one")):
        loaded = {"two": TwoTensor(torch.zeros(4), torch.zeros(4)), "one": torch.zeros(3)}
        with torch.serialization.safe_globals([TwoTensor]):
            load_alone(loaded, reader)
        assert torch.equal(loaded["two"].a, state["two"].a)
        assert torch.equal(loaded["two"].b, state["two"].b)
        assert torch.equal(loaded["one"], state["one"])


def test_a_tensor_without_values_is_refused_by_name(tmp_path: Path) -> None:
    state = {"weight": torch.empty(3, device="meta")}
    with pytest.warns(UserWarning, match="single process"):
        (error,) = failures(
            lambda: dcp.save(state, storage_writer=BackstayWriter(tmp_path / "one"))
        ).values()
    assert isinstance(error, StateError)
    assert "weight is on the meta device" in str(error)


# Asynchronous saves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(AsyncCheckpointerType))
def test_several_asynchronous_saves_in_a_row(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    saved = run_ranks(2, save_async, tmp_path, kind, start="spawn", timeout_s=120)
    assert [entry.step for entry in Catalog(tmp_path).list()] == [1, 2, 3]
    for loaded in run_ranks(1, load_steps, tmp_path):
        for step, before in saved[0].items():
            assert_bit_equal(before, loaded[step])


def save_async(
    rank: int, world_size: int, root: Path, kind: AsyncCheckpointerType
) -> dict[int, dict[str, str]]:
    training = trained(num_steps=1)
    group = dist.new_group(backend="gloo")
    reused = BackstayWriter(root / "unused")
    saved = {}
    for step in (1, 2, 3):
        path = root / f"step-{step:08d}"
        # One writer for all saves, or a new one for each.
        writer = reused if step < 3 else BackstayWriter(path)
        future = dcp.async_save(
            state_of(training),
            storage_writer=writer,
            checkpoint_id=path,
            process_group=group,
            async_checkpointer_type=kind,
        )
        assert isinstance(future, Future)
        saved[step] = bytes_of(training)
        train_step(training)
        future.result(60)
    assert pickle.loads(pickle.dumps(reused)).path == reused.path
    return saved


def load_steps(rank: int, world_size: int, root: Path) -> dict[int, dict[str, str]]:
    found = {}
    for entry in Catalog(root).list():
        assert entry.problems("full") == []
        training = trained(num_steps=1)
        state = state_of(training)
        dcp.load(state, storage_reader=BackstayReader(entry.path, verify="full"))
        load_state(training, state)
        found[entry.step] = bytes_of(training)
    return found


def test_nothing_is_held_between_calls(tmp_path: Path) -> None:
    """A writer crosses process borders, so it has no descriptors and no threads."""
    writer, reader = BackstayWriter(tmp_path / "0"), BackstayReader(tmp_path / "0")
    state = {"a": torch.ones(100_000)}
    save_alone(state, writer)
    load_alone(state, reader)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    save_alone(state, writer, checkpoint_id=tmp_path / "1")
    load_alone(state, reader, checkpoint_id=tmp_path / "1")
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert pickle.loads(pickle.dumps(writer)).path == tmp_path / "1"


# Failures --------------------------------------------------------------------------------------------------------------


def test_a_full_disk_on_one_rank_fails_all_and_the_next_attempt_cleans_up(tmp_path: Path) -> None:
    """P11, P13, P19: several threads write, any of them may meet the error."""
    run_ranks(2, save_on_full_disk, tmp_path, save_now)
    assert names(tmp_path) == {"step-00000001", "step-00000010.incomplete-other"}
    assert Catalog(tmp_path).get(1).problems("full") == []


def test_a_full_disk_fails_an_asynchronous_save_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_on_full_disk, tmp_path, save_later)


def save_now(state: dict[str, Any], writer: BackstayWriter) -> None:
    dcp.save(state, storage_writer=writer)


def save_later(state: dict[str, Any], writer: BackstayWriter) -> None:
    future = dcp.async_save(state, storage_writer=writer)
    assert isinstance(future, Future)
    future.result(60)


def save_on_full_disk(
    rank: int, world_size: int, root: Path, save: Callable[[dict[str, Any], BackstayWriter], None]
) -> None:
    state = state_of(trained())
    other = root / "step-00000010.incomplete-other"
    other.mkdir(exist_ok=True)
    writer = BackstayWriter(root / "step-00000001", num_threads=4, chunk_bytes=4096)
    with inject(fail_at("write.last_chunk", "ENOSPC", rank=1)):
        found = failures(lambda: save(state, writer))
    assert {*found} == {1}
    assert "No space left" in str(found[1])
    assert Catalog(root).list() == []
    left = names(root) - {other.name}
    assert all(name.startswith("step-00000001.incomplete-") for name in left)
    assert len(left) == 1
    dist.barrier()
    save(state, writer)


def test_an_attempt_of_a_checkpointer_at_work_is_left_alone(tmp_path: Path) -> None:
    live, dead = "0123abcd-0001", "0123abcd-0002"
    for attempt in (live, dead):
        (tmp_path / f"step-00000001.incomplete-{attempt}").mkdir()
    (tmp_path / ".attempts" / live).mkdir(parents=True)
    lock = hold_lock(tmp_path, live, rank=0, step=1)
    try:
        save_alone({"b": 5}, BackstayWriter(tmp_path / "step-00000001"))
    finally:
        os.close(lock)
    left = names(tmp_path) - {".attempts"}
    assert left == {"step-00000001", f"step-00000001.incomplete-{live}"}


POINTS = [
    "write.create",
    "write.fsync",
    "commit.metadata",
    "commit.manifest",
    "commit.rename",
    "commit.fsync_parent",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_failure_anywhere_publishes_nothing(tmp_path: Path, point: str) -> None:
    writer = BackstayWriter(tmp_path / "one")
    with inject(fail_at(point)), pytest.warns(UserWarning, match="single process"):
        found = failures(lambda: dcp.save({"a": torch.ones(3)}, storage_writer=writer))
    assert isinstance(found[0], OSError)
    assert not (tmp_path / "one").exists()
    save_alone({"a": torch.ones(3)}, writer)
    assert names(tmp_path) == {"one"}


@pytest.mark.parametrize("part", [slice(1, None), slice(0, 0)])
def test_fewer_items_written_than_planned_are_no_checkpoint(tmp_path: Path, part: slice) -> None:
    """P11: stock publishes what the threads that did not fail wrote."""

    class Forgetful(BackstayWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata, [row[part] for row in results])

    state = {"a": torch.ones(3), "b": 5}
    with pytest.warns(UserWarning, match="single process"):
        found = failures(lambda: dcp.save(state, storage_writer=Forgetful(tmp_path / "one")))
    assert isinstance(found[0], SaveFailed)
    assert not (tmp_path / "one").exists()


def test_a_file_that_the_coordinator_does_not_see_is_no_checkpoint(tmp_path: Path) -> None:
    class Elsewhere(BackstayWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            next(tmp_path.glob("one.incomplete-*/*.distcp")).unlink()
            super().finish(metadata, results)

    with pytest.warns(UserWarning, match="single process"):
        found = failures(lambda: dcp.save({"b": 5}, storage_writer=Elsewhere(tmp_path / "one")))
    assert "shared file system" in str(found[0])
    assert not (tmp_path / "one").exists()


def test_what_is_there_already_is_never_overwritten(tmp_path: Path) -> None:
    run_ranks(2, save_twice, tmp_path)
    assert names(tmp_path) == {"step-00000001"}


def save_twice(rank: int, world_size: int, root: Path) -> None:
    path = root / "step-00000001"
    dcp.save({"a": torch.ones(3)}, storage_writer=BackstayWriter(path))
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    found = failures(lambda: dcp.save({"a": torch.zeros(3)}, storage_writer=BackstayWriter(path)))
    assert {*found} == {0, 1}
    assert all(isinstance(error, StepExists) for error in found.values())
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


def test_a_target_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    class Late(BackstayWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            self.path.mkdir()
            super().finish(metadata, results)

    with pytest.warns(UserWarning, match="single process"):
        found = failures(lambda: dcp.save({"b": 5}, storage_writer=Late(tmp_path / "one")))
    assert isinstance(found[0], StepExists)
    assert names(tmp_path / "one") == set()


def test_ranks_with_different_paths_are_told_so(tmp_path: Path) -> None:
    """P20: nothing is written anywhere."""
    run_ranks(2, save_apart, tmp_path)
    assert names(tmp_path) == set()


def save_apart(rank: int, world_size: int, root: Path) -> None:
    writer = BackstayWriter(root / str(rank))
    found = failures(lambda: dcp.save({"a": torch.ones(3)}, storage_writer=writer))
    assert isinstance(found[0], RanksDisagree)


def test_ranks_that_publish_for_themselves_are_refused(tmp_path: Path) -> None:
    writer = BackstayWriter(tmp_path / "one")
    with pytest.raises(InvalidArgument, match="use_collectives"):
        save_alone({"b": 5}, writer, use_collectives=False)
    assert names(tmp_path) == set()


def test_plans_kept_from_an_earlier_save_are_refused(tmp_path: Path) -> None:
    writer = BackstayWriter(tmp_path / "one")
    planner = DefaultSavePlanner(enable_plan_caching=True)
    with pytest.warns(UserWarning, match="single process"):
        found = failures(lambda: dcp.save({"b": 5}, storage_writer=writer, planner=planner))
    assert isinstance(found[0], InvalidArgument)
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: BackstayWriter("s3://bucket/one"),
        lambda: BackstayReader("memory://one"),
        lambda: BackstayWriter("/"),
        lambda: BackstayWriter("one", num_threads=0),
        lambda: BackstayWriter("one", chunk_bytes=5000),
        lambda: BackstayReader("one", verify="hash"),
        lambda: BackstayReader("one", num_threads=0),
    ],
)
def test_mistakes_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument):
        make()


# What a checkpoint is to the rest of Backstay --------------------------------------------------------------------------


def test_the_catalog_sees_steps_and_restore_reads_them(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    values, moments = get_state_dict(model, optimizer)
    path = tmp_path / "step-00000012"
    save_alone({"model": values, "optimizer": moments}, BackstayWriter(path))
    (entry,) = Catalog(tmp_path).list()
    assert (entry.step, entry.manifest.world_size) == (12, 1)
    assert entry.problems("full") == []
    assert {file.path for file in entry.manifest.files} == {".metadata", "__0_0.distcp"}
    other = nn.Linear(3, 2)
    fresh = torch.optim.AdamW(other.parameters())
    restore(path, TrainState(model=other, optimizer=fresh), only=("model", "optimizer"))
    assert_bit_equal(state_bytes(model, optimizer), state_bytes(other, fresh))


# Reading what is damaged or hostile ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["size", "full"])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_truncated_file_is_found(tmp_path: Path, verify: Any, is_ours: bool) -> None:
    path = tmp_path / "one"
    save_alone(
        {"a": torch.ones(1000)}, BackstayWriter(path) if is_ours else dcp.FileSystemWriter(path)
    )
    os.truncate(path / "__0_0.distcp", 2000)
    loaded = {"a": torch.zeros(1000)}
    error = load_error(loaded, BackstayReader(path, verify=verify))
    assert isinstance(error, CorruptCheckpoint)
    assert "__0_0.distcp" in str(error)
    assert not loaded["a"].any()


def load_error(state: dict[str, Any], reader: BackstayReader) -> BaseException:
    with pytest.warns(UserWarning, match="single process"):
        (error,) = failures(lambda: dcp.load(state, storage_reader=reader)).values()
    return error


def test_a_changed_byte_is_found_by_hash_on_any_rank(tmp_path: Path) -> None:
    run_ranks(2, save_and_damage, tmp_path)


def save_and_damage(rank: int, world_size: int, root: Path) -> None:
    training = trained(num_steps=1)
    path = root / "one"
    dcp.save(state_of(training), storage_writer=BackstayWriter(path))
    if rank == 0:
        with (path / "__1_0.distcp").open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(b"\x55\xaa\x55\xaa")
    dist.barrier()
    reader = BackstayReader(path, verify="full")
    found = failures(lambda: dcp.load(state_of(training), storage_reader=reader))
    assert ["__1_0.distcp differs" in str(error) for error in found.values()] == [True]


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_object_with_code_in_it_is_refused_and_nothing_runs(
    tmp_path: Path, is_ours: bool
) -> None:
    """P74: stock's planner would unpickle it freely."""
    path = tmp_path / "one"
    state = {"a": torch.ones(3), "bomb": Bomb(tmp_path / "ran")}
    save_alone(state, BackstayWriter(path) if is_ours else dcp.FileSystemWriter(path))
    loaded = {"a": torch.zeros(3), "bomb": 0}
    assert isinstance(load_error(loaded, BackstayReader(path)), CorruptCheckpoint)
    assert not (tmp_path / "ran").exists()
    assert not loaded["a"].any(), "what is refused is refused before tensors are changed"
    part = {"a": torch.zeros(3)}
    load_alone(part, BackstayReader(path))
    assert part["a"].all()


def test_metadata_with_code_in_it_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    """P74: metadata is an ordinary pickle."""
    path = tmp_path / "one"
    save_alone({"a": torch.ones(3)}, dcp.FileSystemWriter(path))
    (path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    error = load_error({"a": torch.zeros(3)}, BackstayReader(path))
    assert "nothing of it was run" in str(error)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_that_was_never_committed_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path, TrainState(model=model)) as checkpointer:
        checkpointer.save(1)
    path = tmp_path / "step-00000001"
    (path / "manifest.json").unlink()
    error = load_error({"model": model.state_dict()}, BackstayReader(path))
    assert "never committed" in str(error)
    error = load_error({"model": model.state_dict()}, BackstayReader(tmp_path / "none"))
    assert "expected a checkpoint" in str(error)


def test_frames_written_through_extensions_are_left_to_stock(tmp_path: Path) -> None:
    path = tmp_path / "one"
    save_alone({"a": torch.ones(3)}, dcp.FileSystemWriter(path))
    metadata = dcp.FileSystemReader(path).read_metadata()
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, transform_descriptors=["zstd"])
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    error = load_error({"a": torch.zeros(3)}, BackstayReader(path))
    assert isinstance(error, InvalidArgument)
    assert "zstd" in str(error)


def test_a_root_of_checkpoints_that_stock_dcp_wrote_through_ours_is_restored(
    tmp_path: Path,
) -> None:
    model = nn.Linear(3, 2)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        writer = BackstayWriter(tmp_path / f"step-0000000{step}")
        with pytest.warns(UserWarning, match="single process"):
            dcp.save({"model": model.state_dict()}, storage_writer=writer)
    state = TrainState(model=model)
    assert restore(tmp_path, state, step=1, verify="full", only=("model",)) == 1
    assert model.weight[0, 0].item() == 1
    assert restore(tmp_path, state, only=("model",)) == 2
    path = tmp_path / "step-00000002"
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint, match="bytes, expected"):
        restore(path, state, only=("model",))


def test_a_stock_checkpoint_has_no_step_to_ask_for(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointNotFound, match="records no step"):
        restore(tmp_path, TrainState(model=model), step=3, only=("model",))
