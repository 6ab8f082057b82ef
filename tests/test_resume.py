"""The oracle: interrupted and resumed equals never interrupted, bit for bit, in fresh processes."""

from pathlib import Path

import pytest
from loops import Record, loop

from backstay.testing import run_ranks
from backstay.testing.equality import assert_bit_equal

TOTAL = 6


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 3), ("hsdp", 4)]
)
def test_a_run_killed_after_every_step_equals_one_that_never_was(
    tmp_path: Path, kind: str, num_ranks: int
) -> None:
    whole = run_loop(num_ranks, tmp_path / "whole", kind, stop_at=None)
    pieces = []
    for step in range(1, TOTAL):
        run_loop(num_ranks, tmp_path / "cut", kind, stop_at=step)
    pieces = run_loop(num_ranks, tmp_path / "cut", kind, stop_at=None)
    for rank in range(num_ranks):
        assert pieces[rank].start == TOTAL - 1
        assert_same_end(pieces[rank], whole[rank])


@pytest.mark.parametrize("optimizer", ["sgd", "factored", "two", "in_backward"])
@pytest.mark.parametrize("staging", ["overlap", "block"])
def test_every_optimizer_resumes_exactly(tmp_path: Path, optimizer: str, staging: str) -> None:
    options = {"optimizer": optimizer, "staging": staging}
    whole = run_loop(2, tmp_path / "whole", "fsdp2", stop_at=None, **options)
    run_loop(2, tmp_path / "cut", "fsdp2", stop_at=3, **options)
    rest = run_loop(2, tmp_path / "cut", "fsdp2", stop_at=None, **options)
    for rank in range(2):
        assert rest[rank].start == 3
        assert_same_end(rest[rank], whole[rank])


def run_loop(
    num_ranks: int, root: Path, kind: str, *, stop_at: int | None, **options: str
) -> list[Record]:
    """One incarnation of the loop; when it is to be killed, all its ranks are."""
    return run_ranks(
        num_ranks,
        call_loop,
        root,
        kind,
        stop_at,
        options,
        distributed=num_ranks > 1,
        allow_death=range(num_ranks) if stop_at else (),
    )


def call_loop(
    rank: int, world_size: int, root: Path, kind: str, stop_at: int | None, options: dict[str, str]
) -> Record:
    return loop(rank, world_size, root, kind, TOTAL, stop_at=stop_at, **options)  # type: ignore[arg-type]


def assert_same_end(resumed: Record, whole: Record) -> None:
    """Positions, rates and losses of all steps after the resume, generators, weights and optimizer state."""
    assert resumed.steps == {step: whole.steps[step] for step in resumed.steps}
    assert len(resumed.steps) == TOTAL - resumed.start
    assert resumed.draws == whole.draws
    assert_bit_equal(resumed.state, whole.state)
