"""Collecting a train state: names, what is frozen, late or early, and that nothing is changed by it."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from backstay import PerRank, TrainState
from backstay.errors import InvalidArgument, StateError
from backstay.state import Collected, Collector, find_unstorable
from backstay.testing import run_ranks
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.models import TinyModel, Training, make_training, train_step


def collect(model: nn.Module, **parts: Any) -> Collected:
    return Collector(TrainState(model=model, **parts)).collect()


def state_of(training: Training) -> TrainState:
    return TrainState(
        model=training.model,
        optimizer=training.optimizer,
        lr_scheduler=training.lr_scheduler,
        sampler=training.sampler,
    )


def trained(**options: Any) -> Training:
    training = make_training(**options)
    train_step(training)
    return training


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


# The model ------------------------------------------------------------------------------------------------------------


def test_tied_parameters_are_one_tensor_with_an_alias() -> None:
    model = TinyModel()
    found = collect(model)
    assert found.tensors["model.embedding.weight"] is model.embedding.weight
    assert found.aliases == {"model.head.weight": "model.embedding.weight"}
    assert "model.head.weight" not in found.tensors


def test_a_tensor_that_extra_shares_with_the_model_is_an_alias_too() -> None:
    model = TinyModel()
    found = collect(model, extra={"probe": {"weight": model.never_used}})
    assert found.aliases["extra.probe.weight"] == "model.never_used"


def test_equal_tensors_that_are_not_the_same_object_stay_apart() -> None:
    found = collect(nn.Linear(1, 1), extra={"a": torch.zeros(2), "b": torch.zeros(2)})
    assert {"extra.a", "extra.b"} <= found.tensors.keys()
    assert found.aliases == {}


def test_tensors_are_live_and_all_of_the_model() -> None:
    model = TinyModel()
    found = collect(model)
    live = {f"model.{name}": value for name, value in model.state_dict(keep_vars=True).items()}
    del live["model.head.weight"]
    assert found.tensors.keys() == live.keys()
    assert all(found.tensors[name] is value for name, value in live.items())


def test_frozen_late_and_early_are_told_apart() -> None:
    training = trained()
    found = Collector(state_of(training)).collect()
    assert found.frozen == {"model.block.frozen_scale"}
    assert "model.running_mean" not in found.late | found.frozen
    parameters = {f"model.{name}" for name, _ in training.model.named_parameters()}
    state = {key for key in found.tensors if key.startswith("optimizer.state.")}
    assert found.late == (parameters - found.frozen) | state


def test_a_frozen_parameter_that_is_still_in_an_optimizer_is_late() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model[0].requires_grad_(False)
    found = collect(model, optimizer=optimizer)
    assert found.frozen == set()
    assert "model.0.weight" in found.late


def test_a_parameter_that_is_thawed_is_no_longer_frozen() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    collector = Collector(TrainState(model=model))
    assert collector.collect().frozen == {"model.weight", "model.bias"}
    model.bias.requires_grad_()
    found = collector.collect()
    assert (found.frozen, found.late) == ({"model.weight"}, {"model.bias"})


def test_p08_a_rebound_buffer_is_collected_anew() -> None:
    """P08: the buffer is a new tensor after each step."""
    training = make_training()
    collector = Collector(state_of(training))
    for _ in range(3):
        train_step(training)
        assert collector.collect().tensors["model.running_mean"] is training.model.running_mean


def test_a_rebound_parameter_is_collected_anew() -> None:
    model = nn.Linear(2, 2)
    collector = Collector(TrainState(model=model))
    collector.collect()
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert collector.collect().tensors["model.weight"] is model.weight


def test_a_module_that_was_added_is_collected_with_a_clean_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    collector = Collector(TrainState(model=model))
    collector.collect()
    model.append(checkpoint_wrapper(nn.Linear(2, 2)))
    assert {"model.1.weight", "model.1.bias"} <= collector.collect().tensors.keys()


def test_buffers_that_are_not_persistent_stay_out() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    assert collect(model).tensors.keys() == {"model.weight", "model.bias"}


class Counting(nn.Linear):
    """Has extra state beside its parameters."""

    seen: Any = 3

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_extra_state_of_modules_goes_to_parts() -> None:
    found = collect(nn.Sequential(Counting(2, 2)))
    assert found.parts["model.0._extra_state"] == {"seen": 3}


def test_tensors_in_extra_state_are_stored_as_tensors() -> None:
    model = Counting(2, 2)
    model.seen = torch.tensor([1, 2])
    found = collect(model)
    assert found.parts["model._extra_state"] == {"seen": {"$tensor": "model._extra_state.seen"}}
    assert found.tensors["model._extra_state.seen"] is model.seen


def rename_weight(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")
    state[f"{prefix}scale"] = torch.ones(3)


def test_hooks_on_the_state_dict_may_add_and_rename() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_state_dict_post_hook(rename_weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_once(model, optimizer)
    found = collect(model, optimizer=optimizer)
    assert found.tensors["model.0.kernel"] is model[0].weight
    assert found.tensors["model.0.scale"].tolist() == [1, 1, 1]
    assert "model.0.weight" not in found.tensors
    assert "optimizer.state.0.kernel.momentum_buffer" in found.tensors


def merge_weight(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}weight"] = state[f"{prefix}weight"].detach() * 2


def test_a_parameter_that_a_hook_replaced_keeps_its_name_in_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].register_state_dict_post_hook(merge_weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_once(model, optimizer)
    found = collect(model, optimizer=optimizer)
    assert torch.equal(found.tensors["model.0.weight"], 2 * model[0].weight)
    assert "optimizer.state.0.weight.momentum_buffer" in found.tensors


# The optimizer --------------------------------------------------------------------------------------------------------


def test_optimizer_state_goes_by_the_names_of_parameters() -> None:
    training = trained()
    found = Collector(state_of(training)).collect()
    (optimizer,) = training.optimizers
    weight = training.model.block.mlp[0].weight
    for key in ("step", "exp_avg", "exp_avg_sq"):
        stored = found.tensors[f"optimizer.state.block.mlp.0.weight.{key}"]
        assert stored is optimizer.state[weight][key]
    assert found.owners["block.mlp.0.weight"] == ["step", "exp_avg", "exp_avg_sq"]
    assert found.owner_of[id(weight)] == "block.mlp.0.weight"


def wrap_inside(model: TinyModel) -> nn.Module:
    model.block = checkpoint_wrapper(torch.compile(model.block))
    return model


@pytest.mark.parametrize(
    "wrap",
    [torch.compile, checkpoint_wrapper, wrap_inside, lambda m: torch.compile(wrap_inside(m))],
    ids=["compile", "checkpoint", "inside", "both"],
)
def test_wrappers_do_not_show_in_any_name(wrap: Any) -> None:
    training = trained()
    plain = Collector(state_of(training)).collect()
    training.model = wrap(training.model)
    found = Collector(state_of(training)).collect()
    assert [*found.tensors] == [*plain.tensors]
    assert found.owners == plain.owners
    assert found.groups == plain.groups
    assert found.objects == plain.objects
    assert (found.late, found.frozen, found.aliases) == (plain.late, plain.frozen, plain.aliases)


def collect_under_ddp(rank: int, world_size: int) -> list[str]:
    training = trained(kind="ddp")
    assert isinstance(training.model, DistributedDataParallel)
    return [*Collector(state_of(training)).collect().tensors]


def test_ddp_does_not_show_in_any_name() -> None:
    plain = [*Collector(state_of(trained())).collect().tensors]
    assert run_ranks(2, collect_under_ddp) == [plain, plain]


def collect_under_fsdp(rank: int, world_size: int) -> tuple[list[str], bool, set[str]]:
    found = Collector(state_of(trained(kind="fsdp2"))).collect()
    moments = found.tensors["optimizer.state.block.mlp.0.weight.exp_avg"]
    return [*found.tensors], isinstance(moments, DTensor), found.frozen


def test_sharded_tensors_are_collected_as_they_are() -> None:
    plain = [*Collector(state_of(trained())).collect().tensors]
    expected = (plain, True, {"model.block.frozen_scale"})
    assert run_ranks(2, collect_under_fsdp) == [expected] * 2


def test_fields_of_a_group_are_stored_once_for_all_its_parameters() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1
    )
    found = collect(model, optimizer=optimizer)
    assert [group.owners[0] for group in found.groups] == ["weight", "bias"]
    assert [found.objects[f"{group.slot}.lr"] for group in found.groups] == [0.1, 0.5]
    assert all("params" not in group.fields for group in found.groups)


def test_a_group_without_parameters_is_passed_over() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    assert len(collect(model, optimizer=optimizer).groups) == 1


def test_a_learning_rate_that_is_a_tensor_may_change_at_any_time() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), capturable=False)
    found = collect(model, optimizer=optimizer)
    key = "optimizer.param_groups.weight.lr"
    assert found.tensors[key] is optimizer.param_groups[0]["lr"]
    assert key not in found.late


def test_optimizers_may_own_different_parameters() -> None:
    found = Collector(state_of(trained(optimizer="two"))).collect()
    assert "optimizer.state.embedding.weight.exp_avg" in found.tensors
    assert "optimizer.state.block.norm.weight.momentum_buffer" in found.tensors


def test_a_foreign_parameter_is_an_error_that_describes_it() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3, 7))], lr=0.1)
    with pytest.raises(StateError, match=r"optimizer 0 .*shape \(3, 7\).*not in the model"):
        collect(model, optimizer=optimizer)


def test_a_parameter_in_two_optimizers_is_an_error_that_names_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.SGD([model[0].bias], lr=0.1),
    ]
    with pytest.raises(StateError, match=r"^0\.bias is in two optimizers"):
        collect(model, optimizer=optimizers)


def test_state_of_something_that_is_no_parameter_is_an_error() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"count": 1}
    with pytest.raises(StateError, match="optimizer 0 holds state for 'global'"):
        collect(model, optimizer=optimizer)


def test_hooks_on_the_optimizers_state_dict_are_honoured() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_once(model, optimizer)

    def halve(_: Any, packed: dict[str, Any]) -> None:
        packed["state"][0]["momentum_buffer"] = packed["state"][0]["momentum_buffer"] * 0 + 5

    optimizer.register_state_dict_post_hook(halve)
    found = collect(model, optimizer=optimizer)
    assert found.tensors["optimizer.state.weight.momentum_buffer"].tolist() == [[5, 5], [5, 5]]


# No side effect -------------------------------------------------------------------------------------------------------


def test_p32_collecting_creates_no_optimizer_state() -> None:
    """P32: a checkpoint before the first step holds no moments, and Adam's counter is not moved."""
    training = make_training()
    found = Collector(state_of(training)).collect()
    assert not training.optimizers[0].state
    assert found.owners == {}
    assert not any(key.startswith("optimizer.state.") for key in found.tensors)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "two", "in_backward"])
def test_p32_training_goes_on_as_if_nothing_had_been_collected(optimizer: str) -> None:
    """P32: collected before, between and after steps, against never."""
    plain, collected = (make_training(optimizer=optimizer) for _ in range(2))  # type: ignore[arg-type]
    torch.manual_seed(5)
    for _ in range(3):
        train_step(plain)
    collector = Collector(state_of(collected))
    torch.manual_seed(5)
    for _ in range(3):
        collector.collect()
        train_step(collected)
    assert_bit_equal(
        state_bytes(plain.model, plain.optimizers),
        state_bytes(collected.model, collected.optimizers),
    )


def test_collecting_draws_no_random_numbers() -> None:
    state = state_of(trained())
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    Collector(state).collect()
    after = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    assert after == before


def test_p40_collecting_leaves_the_sampler_alone() -> None:
    """P40: a rank that collects and one that does not see the same samples."""
    training, other = trained(), trained()
    for _ in range(3):
        Collector(state_of(training)).collect()
    assert training.sampler == other.sampler
    assert training.sampler.take(50) == other.sampler.take(50)


def test_gradients_and_versions_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = [(p._version, p.requires_grad, p.grad) for p in model.parameters()]
    collect(model)
    assert [(p._version, p.requires_grad, p.grad) for p in model.parameters()] == before


# The other parts ------------------------------------------------------------------------------------------------------


@dataclass
class Ema:
    """An object of the user's own with a state dict."""

    shadow: Tensor = field(default_factory=lambda: torch.zeros(3))
    decay: float = 0.99

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": self.decay}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.decay = state["shadow"], state["decay"]


def test_sampler_and_schedulers_go_to_parts() -> None:
    training = trained()
    found = Collector(state_of(training)).collect()
    assert found.parts["sampler"] == training.sampler.state_dict()
    assert found.parts["lr_scheduler"]["last_epoch"] == 1  # type: ignore[index, call-overload]


def test_several_schedulers_are_numbered() -> None:
    found = Collector(state_of(trained(optimizer="two"))).collect()
    assert {"lr_scheduler.0", "lr_scheduler.1"} <= found.parts.keys()


def test_extra_takes_objects_modules_tensors_and_plain_values() -> None:
    ema, module, tensor = Ema(), nn.Linear(1, 1), torch.ones(2)
    extra = {
        "ema": ema,
        "teacher": module,
        "tensor": tensor,
        "best": {"loss": 0.1, "steps": (1, 2)},
    }
    found = collect(nn.Identity(), extra=extra)
    assert found.parts["extra.best"] == {"loss": 0.1, "steps": {"$tuple": [1, 2]}}
    assert found.tensors.keys() == {
        "extra.ema.shadow",
        "extra.teacher.weight",
        "extra.teacher.bias",
        "extra.tensor",
    }
    assert found.tensors["extra.teacher.weight"] is module.weight
    assert not found.late | found.frozen


def test_wrappers_do_not_show_in_the_names_of_extra_modules() -> None:
    found = collect(nn.Identity(), extra={"teacher": torch.compile(nn.Linear(1, 1))})
    assert found.tensors.keys() == {"extra.teacher.weight", "extra.teacher.bias"}


def test_per_rank_values_are_marked_with_all_their_tensors() -> None:
    extra = {"replay": PerRank({"items": torch.zeros(2), "count": 3}), "shared": torch.ones(1)}
    found = collect(nn.Identity(), extra=extra)
    assert found.own == {"extra.replay", "extra.replay.items"}
    assert found.parts["extra.replay"] == {
        "items": {"$tensor": "extra.replay.items"},
        "count": 3,
    }


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (object(), "extra.thing"),
        ({"deep": [1, {"er": object()}]}, "extra.thing.deep.1.er"),
        (PerRank({"x": lambda: 0}), "extra.thing.x"),
        ({"inner": PerRank(1)}, "extra.thing.inner"),
    ],
    ids=["object", "nested", "per rank", "per rank inside"],
)
def test_an_unknown_object_in_extra_is_an_error_that_names_its_path(value: Any, path: str) -> None:
    with pytest.raises(StateError) as caught:
        collect(nn.Identity(), extra={"thing": value})
    assert str(caught.value).startswith(f"{path}: ")


def test_two_values_with_one_name_are_an_error() -> None:
    extra = {"a": {"b.c": torch.zeros(1), "b": {"c": torch.ones(1)}}}
    with pytest.raises(StateError, match=r"two values are called 'extra\.a\.b\.c'"):
        collect(nn.Identity(), extra=extra)


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": {}}, "model=.*expected a torch.nn.Module, got a dict"),
        ({"optimizer": "adam"}, "optimizer=.*got a str"),
        ({"optimizer": [torch.nn.Identity()]}, "optimizer=.*got a Identity"),
        ({"sampler": [1, 2]}, "sampler=.*a list has no state_dict"),
        ({"lr_scheduler": 0.1}, "lr_scheduler=.*a float has no state_dict"),
        ({"lr_scheduler": [Ema(), 0.1]}, r"lr_scheduler\.1=.*a float has no state_dict"),
        ({"extra": {"a.b": 1}}, "extra=.*'a.b' is not a name without dots"),
        ({"extra": {"": 1}}, "extra=.*'' is not a name"),
        ({"extra": {1: 1}}, "extra=.*1 is not a name"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_wrong_part_of_a_train_state_is_refused_at_once(parts: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        TrainState(**{"model": nn.Identity(), **parts})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(2, device="meta"), "on the meta device"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        (nn.UninitializedParameter(), "uninitialised: run a forward pass"),
    ],
    ids=["meta", "sparse", "lazy"],
)
def test_tensors_without_dense_values_cannot_be_stored(tensor: Tensor, message: str) -> None:
    reason = find_unstorable([("model.fine", torch.ones(1)), ("model.odd", tensor)])
    assert reason is not None
    assert reason.startswith("model.odd ")
    assert message in reason


def test_dense_tensors_can_be_stored() -> None:
    assert find_unstorable(Collector(state_of(trained())).collect().tensors.items()) is None
