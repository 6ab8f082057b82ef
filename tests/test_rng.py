"""Random number generators come back to the same draws, or to new ones by a fixed rule."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from backstay.errors import CorruptCheckpoint
from backstay.rng import collect_rng, derive_rng, restore_rng
from backstay.testing import run_ranks


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed_all()


def seed_all() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


def draw() -> list[float]:
    """Draws from every generator; an odd number of Gaussians each, so that one stays in reserve."""
    return [
        random.random(),
        random.gauss(0, 1),
        random.getrandbits(64),
        np.random.rand(),
        np.random.randn(),
        np.random.randint(1 << 30),
        torch.rand(()).item(),
        torch.randn(()).item(),
        *torch.randperm(20).tolist(),
    ]


def streams(*, rank: int, world_size: int, data: bytes) -> list[float]:
    derive_rng(data, rank=rank, world_size=world_size)
    return draw()


def changed(**tensors: torch.Tensor | None) -> bytes:
    """A collected state with some tensors replaced, or taken out."""
    merged = load(collect_rng()) | {name.replace("_", "."): each for name, each in tensors.items()}
    return save({name: each for name, each in merged.items() if each is not None})


def draw_elsewhere(rank: int, world_size: int, data: bytes) -> list[float]:
    restore_rng(data)
    return draw()


def test_restored_generators_draw_the_same_again() -> None:
    draw()
    data = collect_rng()
    expected = draw()
    draw()
    restore_rng(data)
    assert draw() == expected


def test_another_process_draws_the_same() -> None:
    data = collect_rng()
    assert run_ranks(1, draw_elsewhere, data, distributed=False) == [draw()]


@pytest.mark.parametrize(
    "gauss", [lambda: random.gauss(0, 1), np.random.randn], ids=["python", "numpy"]
)
def test_the_gaussian_kept_in_reserve_comes_back(gauss: Callable[[], float]) -> None:
    gauss()
    data = collect_rng()
    expected = gauss()
    draw()
    restore_rng(data)
    assert gauss() == expected


@pytest.mark.parametrize(
    "gauss", [lambda: random.gauss(0, 1), np.random.randn], ids=["python", "numpy"]
)
def test_no_gaussian_in_reserve_comes_back_as_none(gauss: Callable[[], float]) -> None:
    data = collect_rng()
    expected = gauss()
    restore_rng(data)
    assert gauss() == expected


def test_collecting_draws_nothing() -> None:
    expected = draw()
    seed_all()
    for _ in range(3):
        collect_rng()
    assert draw() == expected


def test_collecting_twice_gives_the_same_bytes() -> None:
    assert collect_rng() == collect_rng()


def test_every_rank_and_world_size_gets_streams_of_its_own() -> None:
    data = collect_rng()
    places = [(rank, world_size) for world_size in (1, 2, 3, 11) for rank in range(world_size)]
    found = [streams(rank=rank, world_size=size, data=data) for rank, size in places]
    for position in range(8):  # each generator by itself
        assert len({drawn[position] for drawn in found}) == len(places)


def test_derived_streams_depend_on_the_saved_state() -> None:
    first = collect_rng()
    draw()
    second = collect_rng()
    found = [streams(rank=0, world_size=2, data=data) for data in (first, second)]
    assert not {*found[0][:8]} & {*found[1][:8]}


def test_derived_streams_are_the_same_every_time() -> None:
    data = collect_rng()
    first = streams(rank=1, world_size=3, data=data)
    assert streams(rank=1, world_size=3, data=data) == first


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not a state", id="text"),
        pytest.param(bytes(200), id="zeros"),
        pytest.param(b"\x08" + bytes(7) + b"{}      ", id="no tensors"),
    ],
)
def test_garbage_is_a_corrupt_checkpoint(data: bytes) -> None:
    with pytest.raises(CorruptCheckpoint, match="RNG states cannot be read"):
        restore_rng(data)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
def test_a_state_cut_short_is_a_corrupt_checkpoint(part: float) -> None:
    data = collect_rng()
    with pytest.raises(CorruptCheckpoint):
        restore_rng(data[: int(part * len(data))])


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"torch": None}, id="missing"),
        pytest.param({"torch": torch.zeros(4, dtype=torch.uint8)}, id="short"),
        pytest.param({"torch": torch.zeros(5056)}, id="dtype"),
        pytest.param({"python": torch.zeros(3, dtype=torch.int64)}, id="few words"),
        pytest.param({"python": torch.full((625,), -1)}, id="negative"),
        pytest.param({"python_gauss": torch.zeros(2, dtype=torch.float64)}, id="two numbers"),
        pytest.param({"numpy": torch.zeros(3, dtype=torch.int64)}, id="few keys"),
        pytest.param({"numpy_position": torch.tensor([1, 2, 3])}, id="three numbers"),
        pytest.param({"numpy_position": torch.tensor([1 << 50, 0])}, id="far"),
    ],
)
def test_a_state_of_another_form_is_a_corrupt_checkpoint(
    tensors: dict[str, torch.Tensor | None],
) -> None:
    with pytest.raises(CorruptCheckpoint):
        restore_rng(changed(**tensors))
