"""The fingerprint of frozen parameters: one for the same values, however sharded; another for any change."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from backstay import fingerprint
from backstay.coordination import Coordination
from backstay.fingerprint import fingerprint_frozen, sum_tensor
from backstay.state import Collected, Collector, TrainState
from backstay.testing import run_ranks

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


class Base(nn.Module):
    """Frozen parameters whose rows do not divide over ranks, or are fewer than there are; one is trained."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in {
            "tall": (7, 3),
            "one": (1, 5),
            "vector": (5,),
            "deep": (4, 3, 2),
        }.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        half = torch.randn(3, 3, generator=generator).bfloat16()
        self.brief = nn.Parameter(half, requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(6))


def fingerprint_of(model: nn.Module) -> str:
    ranks = Coordination(timeout_s=30)
    try:
        return fingerprint_frozen(Collector(TrainState(model=model)).collect(), ranks)
    finally:
        ranks.close()


def fingerprint_sharded(rank: int, world_size: int, mesh_shape: tuple[int, ...]) -> str:
    model = Base()
    names = ("replicate", "shard")[-len(mesh_shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    return fingerprint_of(model)


def fingerprint_replicated(rank: int, world_size: int) -> str:
    return fingerprint_of(Base())


def fingerprint_by_columns(rank: int, world_size: int) -> str:
    """Sharded along both dimensions, as tensor parallelism beside FSDP does."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = Base()
    model.tall = nn.Parameter(
        distribute_tensor(model.tall, mesh, [Shard(0), Shard(1)]), requires_grad=False
    )
    model.deep = nn.Parameter(
        distribute_tensor(model.deep, mesh, [Replicate(), Shard(2)]), requires_grad=False
    )
    return fingerprint_of(model)


def fingerprint_on_one_rank_only(rank: int, world_size: int) -> str:
    ranks = Coordination(timeout_s=30)
    return fingerprint_frozen(frozen(weight=torch.ones(3)) if rank == 0 else Collected(), ranks)


def frozen(**tensors: torch.Tensor) -> Collected:
    return Collected(tensors=dict(tensors), frozen={*tensors})


def fingerprint_values(**tensors: torch.Tensor) -> str:
    return fingerprint_frozen(frozen(**tensors), Coordination(timeout_s=1))


def values(dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 7).to(dtype)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param((1,), id="1"),
        pytest.param((2,), id="2"),
        pytest.param((3,), id="3"),
        pytest.param((2, 2), id="2x2"),
    ],
)
def test_fsdp2_and_hsdp_have_the_fingerprint_of_the_whole_model(mesh: tuple[int, ...]) -> None:
    num_ranks = int(torch.tensor(mesh).prod())
    found = run_ranks(num_ranks, fingerprint_sharded, mesh)
    assert found == [fingerprint_of(Base())] * num_ranks


def test_replicas_count_once() -> None:
    assert run_ranks(3, fingerprint_replicated) == [fingerprint_of(Base())] * 3


def test_shards_along_other_dimensions_have_the_same_fingerprint() -> None:
    assert run_ranks(4, fingerprint_by_columns) == [fingerprint_of(Base())] * 4


def test_a_rank_without_frozen_parameters_takes_part() -> None:
    found = run_ranks(2, fingerprint_on_one_rank_only)
    assert found == [fingerprint_values(weight=torch.ones(3))] * 2


def test_nothing_frozen_has_no_fingerprint() -> None:
    assert fingerprint_of(nn.Linear(2, 2)) == ""


def test_a_fingerprint_is_16_digits_and_says_the_same_again() -> None:
    first = fingerprint_of(Base())
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert fingerprint_of(Base()) == first


def test_what_is_trained_does_not_count() -> None:
    model = Base()
    before = fingerprint_of(model)
    with torch.no_grad():
        model.trained.add_(1)
    assert fingerprint_of(model) == before


def change_one(model: Base) -> None:
    model.deep[3, 2, 1] += 1e-6


def swap_two(model: Base) -> None:
    model.vector[[0, 1]] = model.vector[[1, 0]]


def swap_rows(model: Base) -> None:
    model.tall[[2, 5]] = model.tall[[5, 2]]


def rename(model: Base) -> None:
    model.other, model.vector = model.vector, None


def cast(model: Base) -> None:
    model.brief = nn.Parameter(model.brief.float(), requires_grad=False)


def reshape(model: Base) -> None:
    model.one = nn.Parameter(model.one.view(5, 1), requires_grad=False)


def thaw(model: Base) -> None:
    model.vector.requires_grad_()


CHANGES = [change_one, swap_two, swap_rows, rename, cast, reshape, thaw]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_any_change_changes_the_fingerprint(change: Callable[[Base], None]) -> None:
    model = Base()
    before = fingerprint_of(model)
    change(model)
    assert fingerprint_of(model) != before


def test_two_parameters_that_trade_values_change_the_fingerprint() -> None:
    one, two = torch.rand(4), torch.rand(4)
    assert fingerprint_values(a=one, b=two) != fingerprint_values(a=two, b=one)


def test_the_sign_of_a_zero_counts() -> None:
    assert fingerprint_values(a=torch.zeros(3)) != fingerprint_values(a=-torch.zeros(3))


def test_another_nan_counts() -> None:
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint_values(a=quiet[:1]) != fingerprint_values(a=quiet[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5, 3)], ids=str)
def test_one_bit_counts_in_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = values(dtype, shape)
    before = fingerprint_values(a=tensor)
    tensor.view(-1).view(torch.uint8)[-1] ^= 1
    assert fingerprint_values(a=tensor) != before


@pytest.mark.parametrize("shape", [(0,), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.bool], ids=str)
def test_an_empty_tensor_counts_by_its_name_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    empty = torch.empty(shape, dtype=dtype)
    found = {
        fingerprint_values(a=empty),
        fingerprint_values(b=empty),
        fingerprint_values(a=empty.half()) if dtype.is_floating_point else "dtype",
        fingerprint_values(a=empty.reshape(0, 7)),
        fingerprint_values(),
    }
    assert len(found) == 5


def test_memory_order_does_not_count() -> None:
    tensor = values(torch.float32)
    assert fingerprint_values(a=tensor.t().contiguous().t()) == fingerprint_values(a=tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_do_not_show(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values(dtype, (11, 13))
    whole = sum_tensor(tensor)
    monkeypatch.setattr(fingerprint, "CHUNK_ELEMENTS", 10)
    assert sum_tensor(tensor) == whole
