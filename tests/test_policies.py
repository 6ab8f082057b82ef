"""When to save and what to keep."""

import pytest

from backstay.errors import InvalidArgument
from backstay.manifest import Manifest
from backstay.policies import RetentionPolicy, SavePolicy


def manifest(step: int, *, tags: tuple[str, ...] = (), **metrics: float) -> Manifest:
    return Manifest(
        step=step,
        run_id="r",
        attempt="0000000a-0001",
        world_size=1,
        created=0.0,
        files=(),
        metrics=metrics,
        tags=tags,
    )


def test_without_a_limit_nothing_expires() -> None:
    assert RetentionPolicy().select_expired([manifest(1), manifest(2)]) == []


def test_the_newest_stay_whatever_the_order_given() -> None:
    shuffled = [manifest(step) for step in (9, 100, 10, 1)]
    assert RetentionPolicy(last=2).select_expired(shuffled) == [1, 9]


def test_multiples_stay_for_ever() -> None:
    found = RetentionPolicy(last=1, every_steps=4).select_expired(
        [manifest(step) for step in range(1, 10)]
    )
    assert found == [1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize(("mode", "expired"), [("min", [1, 3]), ("max", [1, 2])])
def test_the_best_by_a_metric_stay(mode: str, expired: list[int]) -> None:
    """P23: best and last are not mixed up."""
    shelf = [
        manifest(1, loss=2.0),
        manifest(2, loss=1.0),
        manifest(3, loss=3.0),
        manifest(4, loss=2.5),
    ]
    assert (
        RetentionPolicy(last=1, best=1, metric="loss", mode=mode).select_expired(shelf) == expired
    )


def test_nan_and_absent_metrics_are_never_best() -> None:
    shelf = [manifest(1, loss=float("nan")), manifest(2), manifest(3, loss=5.0), manifest(4)]
    assert RetentionPolicy(last=1, best=2, metric="loss").select_expired(shelf) == [1, 2]


def test_of_equals_the_newest_is_best() -> None:
    shelf = [manifest(1, loss=1.0), manifest(2, loss=1.0), manifest(3)]
    assert RetentionPolicy(last=1, best=1, metric="loss").select_expired(shelf) == [1]


def test_tagged_ones_stay_unless_told_otherwise() -> None:
    shelf = [manifest(1, tags=("release",)), manifest(2), manifest(3)]
    assert RetentionPolicy(last=1).select_expired(shelf) == [2]
    assert RetentionPolicy(last=1, keep_tagged=False).select_expired(shelf) == [1, 2]


@pytest.mark.parametrize(
    "fields", [{"last": 0}, {"best": 1}, {"metric": "loss"}, {"mode": "best"}, {"every_steps": -1}]
)
def test_senseless_retention_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        RetentionPolicy(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [{"every_steps": 0}, {"every_s": 0.0}, {"every_s": float("nan")}]
)
def test_senseless_save_policies_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        SavePolicy(**fields)  # type: ignore[arg-type]


def test_saves_are_due_by_step_or_by_clock() -> None:
    policy = SavePolicy(every_steps=10, every_s=60.0)
    assert [step for step in range(1, 31) if policy.is_due_by_step(step)] == [10, 20, 30]
    assert not policy.is_due_by_clock(59.9)
    assert policy.is_due_by_clock(60.0)
    assert not SavePolicy().is_due_by_step(10)
    assert not SavePolicy().is_due_by_clock(1e9)
