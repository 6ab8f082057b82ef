"""Another number of ranks in the middle of a run: no sample is lost or repeated, and the losses are those of the untouched run up to rounding."""

from pathlib import Path
from typing import Any

import pytest
from sft_runs import Stop, make_inputs, records, run_sft

# Sums over another number of ranks are rounded in another order; what that does to the loss grows with the steps.
LOSS_BOUND = 2e-5
NUM_STEPS = 15


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    """A run on two ranks that nobody stopped: three epochs of five steps, without dropout, whose draws depend on the ranks."""
    home = tmp_path_factory.mktemp("untouched")
    values = {
        **make_inputs(home, attention_dropout=0.0),
        "data.packing": "false",
        "epochs": 3,
    }
    assert run_sft(home / "out", values, ranks=2) == [0, 0]
    return home / "out", values


@pytest.mark.parametrize(
    "worlds", [[2, 1, 2], [1, 2], [2, 4, 1]], ids=lambda worlds: "-".join(map(str, worlds))
)
def test_p43_ranks_come_and_go_and_every_sample_comes_once_per_epoch(
    worlds: list[int], untouched: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    reference, values = untouched
    out = tmp_path / "out"
    for number, world in enumerate(worlds):
        is_last = number == len(worlds) - 1
        passes_per_step = 4 // world
        # Four updates and a half, so that the change comes in mid epoch.
        stop = None if is_last else Stop(4 * passes_per_step + passes_per_step - 1)
        ends = run_sft(out, values, ranks=world, stop=stop)
        assert (set(ends) == {0}) == is_last

    ours, theirs = records(out), records(reference)
    assert [*ours] == [*theirs] == list(range(1, NUM_STEPS + 1))
    for epoch in range(3):
        taken = [s for step in range(5 * epoch + 1, 5 * epoch + 6) for s in ours[step]["samples"]]
        assert sorted(taken) == list(range(20))
    for step, record in ours.items():
        assert record["samples"] == theirs[step]["samples"]
        assert record["lr"] == theirs[step]["lr"]
        assert record["loss"] == pytest.approx(theirs[step]["loss"], rel=LOSS_BOUND)
