"""What is saved is what is restored, bit for bit: any number of ranks, any placement, any dtype, ours and stock DCP both ways."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import DTYPES, seed_all, train_state
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from backstay import Checkpointer, TrainState, restore
from backstay.testing import run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.models import Training, make_training, train_step, uneven_model

OPTIMIZERS = ("adamw", "sgd", "factored", "two", "in_backward")
KINDS = [("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4)]


def run(num_ranks: int, fn: Callable[..., Any], *args: object) -> list[Any]:
    return run_ranks(num_ranks, fn, *args, distributed=num_ranks > 1)


def bytes_of(training: Training) -> dict[str, str]:
    """All values but the buffer that differs between ranks by its nature."""
    found = state_bytes(training.model, training.optimizers)
    found.pop("running_mean", None)
    return found


def trained(kind: str, optimizer: str = "adamw", num_steps: int = 3, **options: Any) -> Training:
    """A training some steps old."""
    seed_all(dist.get_rank() if dist.is_initialized() else 0)
    training = make_training(kind, optimizer=optimizer, **options)  # type: ignore[arg-type]
    for _ in range(num_steps):
        train_step(training)
    return training


def fresh(kind: str, optimizer: str = "adamw", **options: Any) -> Training:
    """A training with other values, whose optimizer never made a step."""
    return make_training(kind, optimizer=optimizer, seed=7, **options)  # type: ignore[arg-type]


def save_once(root: Path, state: TrainState, step: int = 3) -> None:
    with Checkpointer(root, state) as checkpointer:
        checkpointer.save(step)


# Ours to ours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "num_ranks"), KINDS)
def test_every_optimizer_comes_back_in_fresh_processes(
    tmp_path: Path, kind: str, num_ranks: int
) -> None:
    saved = run(num_ranks, save_optimizers, tmp_path, kind)
    for before, after in zip(saved, run(num_ranks, load_optimizers, tmp_path, kind), strict=True):
        assert {*before} == {*optimizers_for(kind)}
        for optimizer in before:
            assert_bit_equal(before[optimizer], after[optimizer])


def optimizers_for(kind: str) -> list[str]:
    """DDP reduces gradients too late for optimizers that step during the backward pass."""
    return [each for each in OPTIMIZERS if (kind, each) != ("ddp", "in_backward")]


def save_optimizers(rank: int, world_size: int, root: Path, kind: str) -> dict[str, Any]:
    found = {}
    for optimizer in optimizers_for(kind):
        training = trained(kind, optimizer)
        save_once(root / optimizer, train_state(training))
        found[optimizer] = state_bytes(training.model, training.optimizers)
    return found


def load_optimizers(rank: int, world_size: int, root: Path, kind: str) -> dict[str, Any]:
    found = {}
    for optimizer in optimizers_for(kind):
        training = fresh(kind, optimizer)
        assert restore(root / optimizer, train_state(training), verify="full") == 3
        found[optimizer] = state_bytes(training.model, training.optimizers)
    return found


def test_all_numbers_of_ranks_load_what_any_other_number_saved(tmp_path: Path) -> None:
    saved = {}
    for num_ranks in range(1, 5):
        saved[num_ranks] = run_ranks(num_ranks, save_resharded, tmp_path / str(num_ranks))[0]
    for num_ranks in range(1, 5):
        loaded = run_ranks(num_ranks, load_resharded, tmp_path)
        for source in saved:
            for by_source in loaded:
                assert_bit_equal(saved[source], by_source[source])


def save_resharded(rank: int, world_size: int, root: Path) -> dict[str, str]:
    training = trained("fsdp2", "factored")
    save_once(root, train_state(training))
    return bytes_of(training)


def load_resharded(rank: int, world_size: int, root: Path) -> dict[int, dict[str, str]]:
    found = {}
    for source in range(1, 5):
        training = fresh("fsdp2", "factored")
        restore(root / str(source), train_state(training))
        found[source] = bytes_of(training)
    return found


def test_uneven_and_empty_shards_survive_three_saves_and_loads(tmp_path: Path) -> None:
    """P09, P50: dimensions 1, 2, 5 and 7 over three ranks; fewer rows than ranks leave empty shards."""
    first = run(3, save_uneven, tmp_path)
    again = run(3, save_uneven_again, tmp_path)
    for number in range(3):
        assert_bit_equal(first[number], again[number])


def save_uneven(rank: int, world_size: int, root: Path) -> dict[str, str]:
    training = trained("fsdp2", model=uneven_model)
    save_once(root / "0", train_state(training))
    return state_bytes(training.model, training.optimizers)


def save_uneven_again(rank: int, world_size: int, root: Path) -> dict[str, str]:
    for number in range(2):
        training = fresh("fsdp2", model=uneven_model)
        with Checkpointer(root / str(number + 1), train_state(training)) as checkpointer:
            restore(root / str(number), train_state(training))
            checkpointer.save(3)
    training = fresh("fsdp2", model=uneven_model)
    restore(root / "2", train_state(training))
    return state_bytes(training.model, training.optimizers)


def test_hsdp_moves_to_fsdp_and_back(tmp_path: Path) -> None:
    before = run(4, save_kind, tmp_path / "hsdp", "hsdp")[0]
    assert_bit_equal(before, run(3, load_and_save_kind, tmp_path, "fsdp2")[0])
    assert_bit_equal(before, run(4, load_kind, tmp_path / "next", "hsdp")[0])


def save_kind(rank: int, world_size: int, root: Path, kind: str) -> dict[str, str]:
    training = trained(kind, "factored")
    save_once(root, train_state(training))
    return bytes_of(training)


def load_kind(rank: int, world_size: int, root: Path, kind: str) -> dict[str, str]:
    training = fresh(kind, "factored")
    restore(root, train_state(training))
    return bytes_of(training)


def load_and_save_kind(rank: int, world_size: int, root: Path, kind: str) -> dict[str, str]:
    training = fresh(kind, "factored")
    restore(root / "hsdp", train_state(training))
    save_once(root / "next", train_state(training))
    return bytes_of(training)


# Tensors ---------------------------------------------------------------------------------------------------------------


def test_every_dtype_sharded_and_whole_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    for num_ranks in (2, 1):
        run_ranks(num_ranks, save_zoo, tmp_path / str(num_ranks))
    for num_ranks in (1, 2, 3):
        assert all(run_ranks(num_ranks, load_zoo, tmp_path))


class Zoo(nn.Module):
    """Every dtype, in several shapes: sharded parameters that nothing trains, and plain buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for number, dtype in enumerate(DTYPES):
            name = str(dtype).removeprefix("torch.")
            whole = random_bits((5, 3), dtype, seed + number)
            sharded = shard(whole, mesh)
            self.register_parameter(f"p_{name}", nn.Parameter(sharded, requires_grad=False))
            for shape in ((), (0, 4), (7,)):
                label = f"b_{name}_{len(shape)}_{0 in shape}"
                self.register_buffer(label, random_bits(shape, dtype, seed + number))
        columns = random_bits((4, 6), torch.float32, seed).t()
        self.register_buffer("transposed", columns)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern that the dtype admits."""
    generator = torch.Generator().manual_seed(seed)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def shard(whole: Tensor, mesh: Any) -> DTensor:
    """The first dimension over all ranks, without a collective, which some dtypes lack."""
    size, rank = mesh.size(), dist.get_rank()
    parts = list(torch.chunk(whole, size))
    local = parts[rank] if rank < len(parts) else whole[:0]
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def save_zoo(rank: int, world_size: int, root: Path) -> None:
    save_once(root, TrainState(model=Zoo(0)))


def load_zoo(rank: int, world_size: int, root: Path) -> bool:
    expected = Zoo(0).state_dict()
    for source in ("1", "2"):
        zoo = Zoo(100)
        restore(root / source, TrainState(model=zoo), verify="full")
        for name, value in zoo.state_dict().items():
            assert value.dtype == expected[name].dtype
            assert local_bits(value) == local_bits(expected[name]), name
        assert zoo.transposed.stride() == expected["transposed"].stride()
    return True


def local_bits(tensor: Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_all_placements_come_back_and_change_into_each_other(tmp_path: Path) -> None:
    run(4, save_placements, tmp_path)
    assert all(run(4, load_placements, tmp_path))


PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Replicate(), Shard(1)),
    (Shard(0), Replicate()),
    (Replicate(), Replicate()),
]


class Placed(nn.Module):
    """One matrix in every placement on a 2 x 2 mesh; `turn` shifts which is which."""

    def __init__(self, seed: int, turn: int = 0) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2))
        for number in range(len(PLACEMENTS)):
            placements = PLACEMENTS[(number + turn) % len(PLACEMENTS)]
            whole = torch.arange(35.0).view(5, 7) + 1000 * (seed + number)
            local = DTensor.from_local(whole, mesh, [Replicate()] * 2, run_check=False)
            self.register_parameter(
                f"p{number}", nn.Parameter(local.redistribute(placements=placements))
            )


def save_placements(rank: int, world_size: int, root: Path) -> None:
    save_once(root, TrainState(model=Placed(0)))


def load_placements(rank: int, world_size: int, root: Path) -> bool:
    for turn in range(len(PLACEMENTS)):
        model = Placed(50, turn)
        restore(root, TrainState(model=model))
        for number in range(len(PLACEMENTS)):
            expected = torch.arange(35.0).view(5, 7) + 1000 * number
            assert torch.equal(getattr(model, f"p{number}").full_tensor(), expected)
    return True


# Stock DCP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 3), ("hsdp", 4)]
)
def test_stock_dcp_loads_ours(tmp_path: Path, kind: str, num_ranks: int, flat: bool) -> None:
    saved = run(num_ranks, save_ours, tmp_path, kind)
    loaded = run(num_ranks, load_with_stock, tmp_path, kind, flat)
    for before, after in zip(saved, loaded, strict=True):
        assert_bit_equal(before, after)


def save_ours(rank: int, world_size: int, root: Path, kind: str) -> dict[str, str]:
    training = trained(kind)
    save_once(root, train_state(training))
    return bytes_of(training)


def load_with_stock(
    rank: int, world_size: int, root: Path, kind: str, flat: bool
) -> dict[str, str]:
    training = trained(kind, num_steps=1)
    # One parameter never gets a gradient, so stock has no state for it, before and after.
    options = StateDictOptions(flatten_optimizer_state_dict=flat, strict=False)
    model, optimizer = get_state_dict(training.model, training.optimizers, options=options)
    dcp.load(
        {"model": model, "optimizer": optimizer},
        checkpoint_id=root / "step-00000003" / "weights",
        no_dist=world_size == 1,
    )
    set_state_dict(
        training.model,
        training.optimizers,
        model_state_dict=model,
        optim_state_dict=optimizer,
        options=options,
    )
    return bytes_of(training)


def test_dcp_to_torch_save_converts_ours(tmp_path: Path) -> None:
    run(2, save_ours, tmp_path, "fsdp2")
    target = tmp_path / "whole.pt"
    dcp_to_torch_save(tmp_path / "step-00000003" / "weights", target)
    found = torch.load(target, weights_only=True)
    training = fresh("single")
    restore(tmp_path, train_state(training))
    for name, value in training.model.state_dict().items():
        assert torch.equal(found["model"][name], value), name
    moment = training.optimizer.state[training.model.embedding.weight]["exp_avg"]
    assert torch.equal(found["optimizer"]["state"]["embedding.weight"]["exp_avg"], moment)
    lr = training.optimizer.param_groups[0]["lr"]
    assert found["optimizer"]["param_groups"]["embedding.weight"]["lr"] == lr


@pytest.mark.parametrize("flat", [True, False])
def test_ours_loads_what_stock_saved_on_another_number_of_ranks(tmp_path: Path, flat: bool) -> None:
    before = run(3, save_with_stock, tmp_path, flat)[0]
    for num_ranks in (1, 2):
        kind = "single" if num_ranks == 1 else "fsdp2"
        assert_bit_equal(before, run(num_ranks, load_stock, tmp_path, kind)[0])


def save_with_stock(rank: int, world_size: int, root: Path, flat: bool) -> dict[str, str]:
    training = trained("fsdp2")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(training.model, training.optimizers, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=root)
    return bytes_of(training)


def load_stock(rank: int, world_size: int, root: Path, kind: str) -> dict[str, str]:
    training = fresh(kind)
    assert restore(root, train_state(training), only=("model", "optimizer")) == 0
    return bytes_of(training)


def test_ours_loads_a_bare_model_state_dict_that_stock_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(model.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    restore(tmp_path, TrainState(model=other), only=("model",))
    assert_bit_equal(state_bytes(model), state_bytes(other))


def test_a_model_on_one_rank_takes_what_fully_shard_saved_under_compile(tmp_path: Path) -> None:
    """P47: names do not depend on wrappers."""
    before = run(2, save_compiled, tmp_path)[0]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    restore(tmp_path, TrainState(model=model), only=("model",))
    assert_bit_equal(before, state_bytes(model))


def save_compiled(rank: int, world_size: int, root: Path) -> dict[str, str]:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    save_once(root, TrainState(model=torch.compile(model)))
    return state_bytes(model)
