"""The Checkpointer as a loop meets it: when it saves, what it reports, what it refuses, and what changes in mid-run."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import train_state
from torch import nn
from torch.distributed.fsdp import fully_shard

from backstay import (
    Catalog,
    Checkpointer,
    RetentionPolicy,
    SaveEvent,
    SavePolicy,
    TrainState,
    restore,
)
from backstay.errors import (
    CheckpointNotFound,
    InvalidArgument,
    RankFailed,
    RankMissing,
    StateError,
    StateMismatch,
)
from backstay.events import read_events
from backstay.testing import run_ranks, slow_at
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.faults import inject
from backstay.testing.models import make_training, train_step


def tiny() -> TrainState:
    return TrainState(model=nn.Linear(2, 2))


def steps_of(root: Path) -> list[int]:
    return [entry.step for entry in Catalog(root).list()]


# When ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "total", "expected"), [(3, 7, [3, 6, 7]), (3, 6, [3, 6]), (None, 4, [4]), (10, 0, [])]
)
def test_the_last_step_is_saved_exactly_once(
    tmp_path: Path, every: int | None, total: int, expected: list[int]
) -> None:
    """P29: no final checkpoint, or two of them; resuming a finished run does nothing."""
    for _ in range(2):
        with Checkpointer(tmp_path, tiny(), save=SavePolicy(every_steps=every)) as checkpointer:
            for step in range(checkpointer.restore() + 1, total + 1):
                checkpointer.maybe_save(step)
        assert steps_of(tmp_path) == expected
    assert checkpointer.events == []


def test_without_at_end_the_last_step_is_left(tmp_path: Path) -> None:
    policy = SavePolicy(every_steps=2, at_end=False)
    with Checkpointer(tmp_path, tiny(), save=policy) as checkpointer:
        for step in range(1, 4):
            checkpointer.maybe_save(step)
    assert steps_of(tmp_path) == [2]


def test_a_file_in_the_root_asks_for_a_save(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_on_file, tmp_path)
    assert first == second == steps_of(tmp_path)
    assert len(first) == 1
    assert not (tmp_path / "save-now").exists()


def save_on_file(rank: int, world_size: int, root: Path) -> list[int]:
    saved = []
    torch.manual_seed(0)
    with Checkpointer(root, tiny(), save=SavePolicy(at_end=False)) as checkpointer:
        for step in range(1, 40):
            if rank == 0 and step == 2:
                (root / "save-now").touch()
            if checkpointer.maybe_save(step) is not None:
                saved.append(step)
            time.sleep(0.05)
    return saved


def test_the_clock_of_rank_0_decides_for_all(tmp_path: Path) -> None:
    """Rank 1 is 10 s ahead, by its own clock."""
    found = run_ranks(2, save_by_clock, tmp_path)
    assert found[0] == found[1]
    assert found[0][0] is False
    assert True in found[0]


def save_by_clock(rank: int, world_size: int, root: Path) -> list[bool]:
    saved = []
    torch.manual_seed(0)
    policy = SavePolicy(every_s=0.2, at_end=False)
    with Checkpointer(root, tiny(), save=policy) as checkpointer:
        checkpointer._save_began -= 10 * rank
        for step in range(1, 40):
            saved.append(checkpointer.maybe_save(step) is not None)
            dist.barrier()
            if saved[-1]:
                break
            time.sleep(0.02)
    return saved


# What it reports -------------------------------------------------------------------------------------------------------


def test_each_save_yields_one_event_to_all_who_listen(tmp_path: Path) -> None:
    heard: list[SaveEvent] = []
    with Checkpointer(tmp_path, tiny(), on_event=heard.append) as checkpointer:
        for step in range(1, 4):
            checkpointer.save(step)
    assert heard == checkpointer.events == read_events(tmp_path)
    assert [event.step for event in heard] == [1, 2, 3]
    for event in heard:
        assert event.outcome == "committed"
        assert 0 < event.staged_s < event.committed_s
        assert event.blocked_s > 0
        assert event.num_bytes == Catalog(tmp_path).get(event.step).manifest.num_bytes
    assert [event.unchanged for event in heard] == [False, True, True]
    assert "3 saves; training time lost to them" in checkpointer.report()


def test_a_callback_that_raises_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def complain(event: SaveEvent) -> None:
        raise KeyError("mine")

    with Checkpointer(tmp_path, tiny(), on_event=complain) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    assert steps_of(tmp_path) == [1, 2]
    assert "on_event raised for step 1" in caplog.text


def test_a_trainable_set_that_does_not_change_is_reported_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, tiny()) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    assert "step 2: every trained value is what it was" in caplog.text
    assert "step 1: every" not in caplog.text


def test_metrics_and_tags_are_in_the_manifest_and_tagged_steps_stay(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, tiny(), keep=RetentionPolicy(last=1)) as checkpointer:
        checkpointer.save(1, metrics={"loss": torch.tensor(0.5)}, tags=["good"])
        checkpointer.save(2)
        checkpointer.save(3)
    assert steps_of(tmp_path) == [1, 3]
    manifest = Catalog(tmp_path).get(1).manifest
    assert (manifest.metrics, manifest.tags) == ({"loss": 0.5}, ("good",))
    assert manifest.versions["torch"] == torch.__version__


# What it refuses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.save(-1), "step=-1"),
        (lambda c: c.save(True), "step=True"),
        (lambda c: c.save(1.5), "step=1.5"),
        (lambda c: c.save(1, metrics={"loss": "low"}), "metrics"),
        (lambda c: c.save(1, tags="word"), "tags='word'"),
        (lambda c: c.restore(only="model"), "only='model'"),
        (lambda c: c.restore(only=["weights"]), "only="),
        (lambda c: c.restore(verify="no"), "verify='no'"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_lost(
    tmp_path: Path, call: Any, message: str
) -> None:
    with Checkpointer(tmp_path, tiny()) as checkpointer:
        with pytest.raises(InvalidArgument, match=message):
            call(checkpointer)
        checkpointer.save(5)
    assert steps_of(tmp_path) == [5]


def test_a_bad_argument_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    assert run_ranks(2, pass_nonsense, tmp_path, timeout_s=20) == [[1], [1]]


def pass_nonsense(rank: int, world_size: int, root: Path) -> list[int]:
    torch.manual_seed(0)
    with Checkpointer(root, tiny()) as checkpointer:
        with pytest.raises(InvalidArgument, match="tags"):
            checkpointer.save(1, tags=["a"] if rank == 0 else "a")
        checkpointer.save(1)
    return steps_of(root)


def test_a_closed_checkpointer_says_so(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, tiny())
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(InvalidArgument, match="closed"):
        checkpointer.save(1)


@pytest.mark.parametrize("options", [{"staging": "later"}, {"on_failure": "shrug"}])
def test_unknown_choices_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        Checkpointer(tmp_path, tiny(), **options)


def test_a_root_that_cannot_be_made_is_refused_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run_ranks(2, use_a_file_as_root, tmp_path / "file" / "run", timeout_s=20)


def use_a_file_as_root(rank: int, world_size: int, root: Path) -> None:
    with pytest.raises(RankFailed, match="rank 0: NotADirectoryError"):
        Checkpointer(root, tiny())


def test_a_step_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    """P26: an explicitly named step that is not there is an error."""
    with Checkpointer(tmp_path, tiny()) as checkpointer:
        assert checkpointer.restore() == 0
        checkpointer.save(5)
        with pytest.raises(CheckpointNotFound, match=r"step 7.*steps there: 5"):
            checkpointer.restore(7)


def test_a_dead_rank_is_named_within_seconds(tmp_path: Path) -> None:
    found = run_ranks(3, lose_a_rank, tmp_path, timeout_s=40, allow_death=[1])
    for rank in (0, 2):
        message, seconds = found[rank]
        assert "missing: rank 1" in message
        assert seconds < 15


def test_a_rank_that_does_not_come_is_named_after_the_limit(tmp_path: Path) -> None:
    found = run_ranks(2, wait_for_a_rank, tmp_path, timeout_s=40)
    assert "missing: rank 1" in found[0]


def lose_a_rank(rank: int, world_size: int, root: Path) -> tuple[str, float]:
    torch.manual_seed(0)
    checkpointer = Checkpointer(root, tiny())
    checkpointer.save(1)
    checkpointer.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankMissing) as caught:
        checkpointer.save(2)
    return str(caught.value), time.monotonic() - began


def wait_for_a_rank(rank: int, world_size: int, root: Path) -> str:
    torch.manual_seed(0)
    checkpointer = Checkpointer(root, tiny(), agree_timeout_s=1.0)
    if rank == 1:
        (root / "here").touch()
        while not (root / "told").exists():
            time.sleep(0.01)
        return ""
    with pytest.raises(RankMissing) as caught:
        checkpointer.save(1)
    (root / "told").touch()
    return str(caught.value)


# What changes in mid-run -----------------------------------------------------------------------------------------------


def test_parameters_unfrozen_and_state_appearing_in_mid_run_are_planned_anew(
    tmp_path: Path,
) -> None:
    assert run_ranks(2, change_in_mid_run, tmp_path) == [True, True]


def change_in_mid_run(rank: int, world_size: int, root: Path) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    for layer in model:
        fully_shard(layer)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    state = TrainState(model=model, optimizer=optimizer, extra={"note": "short"})
    expected = {}
    with Checkpointer(root, state) as checkpointer:
        for step in range(1, 7):
            if step == 3:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.5})
            if step == 5:
                state.extra |= {"note": "long " * 1000, "more": torch.arange(step)}
                optimizer.param_groups[0]["comment"] = "longer than its slot " * 100
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            checkpointer.save(step)
            checkpointer.wait()
            expected[step] = state_bytes(model, optimizer)
        planned = [event.step for event in checkpointer.events if event.is_planned]
    assert planned == [3, 5]
    for step in (2, 4, 6):
        torch.manual_seed(9)
        fresh = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        for layer in fresh:
            fully_shard(layer)
        again = torch.optim.AdamW(fresh[1].parameters())
        if step > 2:
            again.add_param_group({"params": list(fresh[0].parameters())})
        extra = (
            {"note": ""} if step < 5 else {"note": "", "more": torch.zeros(5, dtype=torch.int64)}
        )
        restored = TrainState(model=fresh, optimizer=again, extra=extra)
        restore(root, restored, step=step)
        assert_bit_equal(expected[step], state_bytes(fresh, again))
        assert len(restored.extra["note"]) == (5 if step < 5 else 5000)
    return True


def test_an_optimizer_step_before_the_first_save_has_planned_already(tmp_path: Path) -> None:
    training = make_training()
    with Checkpointer(tmp_path, train_state(training)) as checkpointer:
        train_step(training)
        checkpointer.save(1)
    assert [event.is_planned for event in checkpointer.events] == [False]


def test_several_checkpointers_may_watch_one_optimizer(tmp_path: Path) -> None:
    training = make_training()
    state = train_state(training)
    with Checkpointer(tmp_path / "a", state) as one, Checkpointer(tmp_path / "b", state) as other:
        train_step(training)
        one.save(1)
        other.save(1)
        train_step(training)
    assert steps_of(tmp_path / "a") == steps_of(tmp_path / "b") == [1]


def test_a_state_that_cannot_be_stored_is_refused_at_the_first_step(tmp_path: Path) -> None:
    """P65: refused at start, not at the first save."""
    training = make_training()
    state = train_state(training, odd={"file": open})
    with Checkpointer(tmp_path, state, save=SavePolicy(at_end=False)) as checkpointer:
        with pytest.raises(StateError, match=r"extra\.odd\.file"):
            train_step(training)
        with pytest.raises(StateError, match=r"extra\.odd\.file"):
            checkpointer.maybe_save(1)


def test_ranks_with_values_of_their_own_names_share_a_checkpoint(tmp_path: Path) -> None:
    """As the stages of a pipeline do."""
    assert run_ranks(2, save_stages, tmp_path) == [True, True]


def save_stages(rank: int, world_size: int, root: Path) -> bool:
    def build(seed: int) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
        torch.manual_seed(seed + rank)
        model = nn.ModuleDict({f"stage{rank}": nn.Linear(3, 3)})
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build(0)
    with Checkpointer(root, TrainState(model=model, optimizer=optimizer)) as checkpointer:
        for step in range(1, 3):
            model[f"stage{rank}"](torch.ones(1, 3)).sum().backward()
            optimizer.step()
            checkpointer.save(step)
        assert [event.is_planned for event in checkpointer.events[:1]] in ([], [False])
    other, again = build(50)
    restore(root, TrainState(model=other, optimizer=again), strict=False)
    assert_bit_equal(state_bytes(model, optimizer), state_bytes(other, again))
    return True


# What else a state may hold ---------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """Stores its weight twice as large, and takes it back; and has extra state."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(value)))
        self.mood = {"good": value}
        self.register_state_dict_post_hook(self.double)
        self.register_load_state_dict_pre_hook(self.halve)

    @staticmethod
    def double(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}double"] = state.pop(f"{prefix}weight") * 2

    @staticmethod
    def halve(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}double") / 2

    def get_extra_state(self) -> Any:
        return self.mood

    def set_extra_state(self, state: Any) -> None:
        self.mood = state


def test_state_dict_hooks_and_extra_state_are_honoured_both_ways(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, TrainState(model=Hooked(1.5))) as checkpointer:
        checkpointer.save(1)
    found = {*restore_names(tmp_path)}
    assert found == {"model.double"}
    other = Hooked(0)
    restore(tmp_path, TrainState(model=other))
    assert other.weight.tolist() == [1.5] * 3
    assert other.mood == {"good": 1.5}


def restore_names(root: Path) -> list[str]:
    from backstay.load.metadata import read_metadata

    entry = Catalog(root).latest()
    assert entry is not None
    return list(read_metadata(entry.path / "weights").state_dict_metadata)


def test_extras_come_back_in_place_or_in_the_dict(tmp_path: Path) -> None:
    ema = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    values = {"list": [1, (2.5, None)], "set": {3}, 7: b"bytes"}
    extra = {"ema": ema, "tensor": torch.ones(2), "plain": values, "number": 3}
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path, TrainState(model=model, extra=extra)) as checkpointer:
        checkpointer.save(1)
    mine = torch.zeros(2)
    other = {
        "ema": torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
        "tensor": mine,
        "plain": {},
        "number": 0,
    }
    state = TrainState(model=model, extra=other)
    restore(tmp_path, state)
    assert_bit_equal(state_bytes(ema), state_bytes(state.extra["ema"]))
    assert state.extra["tensor"] is mine
    assert mine.tolist() == [1, 1]
    assert state.extra["plain"] == values
    assert state.extra["number"] == 3


def test_all_differences_are_reported_at_once_and_nothing_is_changed(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    with Checkpointer(tmp_path, TrainState(model=model)) as checkpointer:
        checkpointer.save(1)
    other = nn.ModuleDict(
        {
            "a": nn.Linear(2, 3),
            "b": nn.Linear(2, 2).bfloat16(),
            "d": nn.Linear(2, 2),
            "x": nn.Linear(1, 1),
        }
    )
    before = state_bytes(other)
    with pytest.raises(StateMismatch) as caught:
        restore(tmp_path, TrainState(model=other))
    for line in (
        "model.a.weight: shape (2, 2) in the checkpoint, (3, 2) here",
        "model.b.weight: torch.float32 in the checkpoint, torch.bfloat16 here",
        "model.d.weight: missing from the checkpoint",
        "model.c.weight: in the checkpoint, but there is no such value here",
    ):
        assert line in str(caught.value)
    assert_bit_equal(before, state_bytes(other))


def test_strict_off_loads_what_fits_and_only_chooses_parts(tmp_path: Path) -> None:
    training = make_training()
    train_step(training)
    with Checkpointer(tmp_path, train_state(training)) as checkpointer:
        checkpointer.save(1)
    bigger = nn.ModuleDict({"new": nn.Linear(2, 2)})
    for name, child in training.model.named_children():
        bigger[name] = child
    fresh = make_training(seed=3)
    restore(tmp_path, TrainState(model=fresh.model), only=("model",))
    assert_bit_equal(state_bytes(training.model), state_bytes(fresh.model))
    with pytest.raises(StateMismatch, match="new"):
        restore(tmp_path, TrainState(model=bigger), only=("model",))
    restore(tmp_path, TrainState(model=bigger), only=("model",), strict=False)


def test_slots_and_a_cap_reach_the_writers(tmp_path: Path) -> None:
    """Two writers share one slot; 1 MB at 4 MB/s takes a quarter of a second."""
    events = run_ranks(2, save_throttled, tmp_path)
    assert all(event["written_s"] > 0.1 for event in events)


def save_throttled(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    model = fully_shard(nn.Linear(512, 512))
    options: dict[str, Any] = {
        "write_slots": 1,
        "bandwidth_bytes_per_s": 4 << 20,
        "chunk_bytes": 1 << 16,
    }
    with Checkpointer(root, TrainState(model=model), **options) as checkpointer:
        checkpointer.save(1)
    return json.loads(json.dumps(vars(checkpointer.events[0])))  # type: ignore[no-any-return]


def test_a_slow_save_is_waited_for_by_the_next(tmp_path: Path) -> None:
    with inject(slow_at("writer.received", 0.2)), Checkpointer(tmp_path, tiny()) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    assert checkpointer.events[1].drained_s > 0.1
    assert "waiting for the save before" in checkpointer.report()
