"""The file of frozen parameters is linked only while they have the very content that it holds."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from backstay import Checkpointer, TrainState, restore
from backstay.save.frozen import FrozenFile, digest_frozen
from backstay.testing import run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes

Named = list[tuple[str, Tensor]]


@pytest.fixture
def tensors() -> Named:
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    return [("a", weight), ("b", torch.zeros(2, 2)), ("c", torch.tensor(5))]


def test_a_home_is_known_for_one_content_until_it_is_forgotten() -> None:
    file = FrozenFile()
    assert file.find("") is None
    file.settle("home", "digest")
    assert file.find("digest") == "home"
    assert file.find("other") is None
    file.forget()
    assert file.find("digest") is None


def test_nothing_has_no_digest() -> None:
    assert digest_frozen([]) == ""


def replace_with_an_equal(tensors: Named) -> None:
    tensors[1] = ("b", tensors[1][1].clone())


def change_to_the_same_values(tensors: Named) -> None:
    tensors[2][1].fill_(5)


@pytest.mark.parametrize("change", [replace_with_an_equal, change_to_the_same_values])
def test_the_same_content_has_the_same_digest(
    tensors: Named, change: Callable[[Named], None]
) -> None:
    before = digest_frozen(tensors)
    change(tensors)
    assert digest_frozen(tensors) == before


def change_behind_the_back(tensors: Named) -> None:
    tensors[0][1].data[1] = 4.0


def change_one_bit(tensors: Named) -> None:
    tensors[1][1].view(torch.int32)[1, 1] = 1


def change_the_sign_of_zero(tensors: Named) -> None:
    tensors[1][1].neg_()


def change_the_dtype(tensors: Named) -> None:
    tensors[1] = ("b", torch.zeros(2, 2, dtype=torch.int32))


def change_the_shape(tensors: Named) -> None:
    tensors[1] = ("b", torch.zeros(4))


def trade_names(tensors: Named) -> None:
    tensors[1], tensors[2] = ("b", tensors[2][1]), ("c", tensors[1][1])


def drop_one(tensors: Named) -> None:
    tensors.pop()


CHANGES = [
    change_behind_the_back,
    change_one_bit,
    change_the_sign_of_zero,
    change_the_dtype,
    change_the_shape,
    trade_names,
    drop_one,
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_content_has_another_digest(
    tensors: Named, change: Callable[[Named], None]
) -> None:
    before = digest_frozen(tensors)
    change(tensors)
    assert digest_frozen(tensors) != before


class Student(nn.Module):
    """A trainable layer beside a frozen one, as a base or a momentum teacher is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_frozen_files_are_linked_while_unchanged_and_written_anew_after_any_change(
    tmp_path: Path, num_ranks: int
) -> None:
    """Changes that torch does not count, on sharded tensors, are seen as well."""
    for links in run_ranks(num_ranks, save_and_change, tmp_path):
        assert links == [3, 3, 3, 1, 2, 2]


def save_and_change(rank: int, world_size: int, root: Path) -> list[int]:
    model = fully_shard(Student())
    expected = {}
    with Checkpointer(root, TrainState(model=model)) as checkpointer:
        for step in range(1, 7):
            if step in (4, 5):
                teacher = [parameter.detach() for parameter in model.teacher.parameters()]
                torch._foreach_add_(teacher, 1.0)
            checkpointer.save(step)
            checkpointer.wait()
            expected[step] = state_bytes(model)
    for step, values in expected.items():
        restore(root, TrainState(model=model), step=step)
        assert_bit_equal(values, state_bytes(model))
    names = [root / f"step-{step:08d}" / "weights" / f"__{rank}_1.distcp" for step in expected]
    return [os.stat(name).st_nlink for name in names]


def test_a_resumed_run_links_to_what_it_restored(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with Checkpointer(tmp_path, TrainState(model=Student())) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path, TrainState(model=Student())) as checkpointer:
        assert checkpointer.restore() == 1
        checkpointer.save(2)
    paths = [tmp_path / f"step-0000000{step}" / "weights" / "__0_1.distcp" for step in (1, 2)]
    assert os.path.samefile(*paths)
