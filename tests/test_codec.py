"""Trees of Python values survive the trip to JSON and back, exactly."""

import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from backstay.codec import decode, encode, tensor_paths
from backstay.errors import CorruptCheckpoint, StateError


def round_trip(value: object) -> object:
    tensors: dict[str, torch.Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, "root", tensors))), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        0.1 + 0.2,
        5e-324,
        math.inf,
        "ä",
        b"\x00\xff",
        (1, [2.5, ("x",)]),
        {1: "one", (2, 3): None},
        {"$tensor": "not a reference"},
        {1, 2},
        Counter({30: 1}),
        OrderedDict([("b", 1), ("a", 2)]),
        torch.bfloat16,
        torch.device("cpu"),
    ],
)
def test_a_value_comes_back_equal_and_of_the_same_type(value: object) -> None:
    found = round_trip(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_and_numpy_arrays_come_back() -> None:
    assert math.isnan(round_trip(math.nan))  # type: ignore[arg-type]
    array = np.arange(6, dtype=np.uint64).reshape(2, 3)
    np.testing.assert_array_equal(round_trip(array), array)


def test_a_schedule_comes_back_to_the_last_bit() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    assert round_trip(schedule.state_dict()) == schedule.state_dict()


def test_tensors_are_handed_out_by_path() -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = encode({"a": [torch.ones(2)]}, "extra.ema", tensors)
    assert list(tensors) == tensor_paths(tree) == ["extra.ema.a.0"]


def test_an_unknown_type_is_refused_by_path() -> None:
    with pytest.raises(StateError, match=r"extra\.x\.1: a value of type .*object"):
        encode({"x": [0, object()]}, "extra", {})


@pytest.mark.parametrize("value", [{"$what": 1}, {"$float": "x"}, {"$tensor": "gone"}])
def test_what_encode_does_not_write_is_refused(value: object) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode(value, {})
