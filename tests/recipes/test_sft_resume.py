"""The oracle: a run of the recipe that was stopped and resumed in fresh processes is, bit for bit, the run that was not."""

import signal
from pathlib import Path
from typing import Any

import pytest
from sft_runs import Stop, final_state, make_inputs, records, run_sft, steps_by_attempt

from backstay.training.signals import STOPPED

# Two ranks take two micro-batches per step each, so forward pass 2k is the first of step k + 1, and an epoch has five steps.
STOPS = {
    "mid_epoch": [Stop(2 * 2 + 1)],
    "epoch_boundary": [Stop(2 * 4 + 1, rank=1)],
    "second_epoch": [Stop(2 * 6 + 1)],
    "between_micro_batches": [Stop(2 * 3, rank=1)],
    "between_micro_batches_of_the_last_step": [Stop(2 * 9)],
    "last_step": [Stop(2 * 9 + 1)],
    "twice_in_one_epoch": [Stop(2 * 1), Stop(1)],
    "killed": [Stop(2 * 4, number=signal.SIGKILL, rank=1)],
}
DONE_BEFORE = {
    "mid_epoch": [3],
    "epoch_boundary": [5],
    "second_epoch": [7],
    "between_micro_batches": [3],
    "between_micro_batches_of_the_last_step": [9],
    "last_step": [10],
    "twice_in_one_epoch": [1, 2],
    "killed": [4],
}
# Each pair of values of loader workers, packing and mode occurs.
MODES = {
    "packed-async": {"data.num_workers": 0, "data.packing": "true", "checkpoint.mode": "async"},
    "workers-async": {"data.num_workers": 2, "data.packing": "false", "checkpoint.mode": "async"},
    "sync": {"data.num_workers": 0, "data.packing": "false", "checkpoint.mode": "sync"},
    "packed-workers-sync": {
        "data.num_workers": 2,
        "data.packing": "true",
        "checkpoint.mode": "sync",
    },
}


@pytest.fixture(scope="module", params=MODES)
def untouched(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    """A run that nobody stopped, and the values that it ran with."""
    home = tmp_path_factory.mktemp("untouched")
    is_packed = "packed" in request.param
    values = {**make_inputs(home, num_sequences=20, is_packed=is_packed), **MODES[request.param]}
    assert run_sft(home / "out", values, ranks=2) == [0, 0]
    return home / "out", values


@pytest.mark.parametrize("name", STOPS)
def test_a_resumed_run_is_the_untouched_run(
    name: str, untouched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    reference, values = untouched
    out = tmp_path / "out"
    for stop in STOPS[name]:
        ends = run_sft(out, values, ranks=2, stop=stop)
        assert ends == [0, 0] if name == "last_step" else 0 not in ends
        assert name == "killed" or set(ends) <= {0, STOPPED}
    assert run_sft(out, values, ranks=2) == [0, 0]

    assert records(out) == records(reference)
    assert final_state(out) == final_state(reference)
    starts = [steps[0] for steps in steps_by_attempt(out)[1:]]
    assert starts == [step + 1 for step in DONE_BEFORE[name] if step < 10]


def test_an_epoch_has_the_steps_that_the_stops_are_made_for(
    untouched: tuple[Path, dict[str, Any]],
) -> None:
    by_step = records(untouched[0])
    assert [step for step in by_step if by_step[step]["epoch"] in (1.0, 2.0)] == [5, 10]
    first, second = (
        sorted(sample for step in steps for sample in by_step[step]["samples"])
        for steps in (range(1, 6), range(6, 11))
    )
    assert first == second == list(range(20))
