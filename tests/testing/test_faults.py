"""Actions happen at their point, their rank and their turn."""

import errno
import signal
import threading
import time
from pathlib import Path

import pytest

from backstay import points
from backstay.errors import InvalidArgument
from backstay.testing import Gate, fail_at, inject, kill_at, run_ranks, slow_at


def reach_under_a_kill(rank: int, world_size: int) -> str:
    with inject(kill_at("save.stage", rank=1, nth=2)):
        points.reach("save.stage")
        points.reach("save.stage")
    return "alive"


def test_a_kill_hits_its_rank_only() -> None:
    results = run_ranks(2, reach_under_a_kill, allow_death={1})
    assert results == ["alive", f"killed by signal {int(signal.SIGKILL)}"]


def test_a_failure_has_its_errno_and_ends_with_the_block() -> None:
    with (
        inject(fail_at("write.fsync", "ENOSPC")),
        pytest.raises(OSError, match="injected") as caught,
    ):
        points.reach("write.fsync")
    assert caught.value.errno == errno.ENOSPC
    points.reach("write.fsync")


def test_an_inner_block_adds_to_the_outer_one() -> None:
    with inject(fail_at("write.create")):
        with inject(fail_at("load.read")), pytest.raises(OSError, match=r"write\.create"):
            points.reach("write.create")
        points.reach("load.read")


def test_slowness_is_there_each_time() -> None:
    begin = time.monotonic()
    with inject(slow_at("load.read", 0.02)):
        points.reach("load.read")
        points.reach("load.read")
    assert time.monotonic() - begin >= 0.04


def test_a_gate_holds_until_it_is_opened(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate", "save.submit")
    passed = threading.Event()
    with gate, inject(gate.action):
        thread = threading.Thread(target=lambda: (points.reach("save.submit"), passed.set()))
        thread.start()
        gate.wait_reached()
        assert not passed.is_set()
        gate.open()
        thread.join()
    assert passed.is_set()


def test_a_gate_that_nobody_reaches_says_so(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"nobody reached save\.begin"):
        Gate(tmp_path / "gate", "save.begin").wait_reached(timeout_s=0.01)


def test_mistakes_are_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="ENOSPACE"):
        fail_at("write.fsync", "ENOSPACE")
    with pytest.raises(ValueError, match="unknown points"), inject(kill_at("save.nowhere")):
        pass
