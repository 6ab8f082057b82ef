"""Ranks run, return, fail and die as `run_ranks` promises."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from backstay.testing import RanksFailed, run_ranks


def sum_over_ranks(rank: int, world_size: int, offset: int) -> int:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return int(value)


def describe_process(rank: int, world_size: int) -> tuple[bool, int, str, str]:
    print("hello from a rank")
    return dist.is_initialized(), torch.get_num_threads(), os.getcwd(), os.environ["COLOUR"]


def raise_on_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the second rank does not like this")
    dist.barrier()


def hang_on_rank_zero(rank: int, world_size: int) -> None:
    if rank == 0:
        threading.Event().wait()


def die_on_rank_one(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def return_pid_and_wait(rank: int, world_size: int, path: str) -> None:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    threading.Event().wait()


def test_results_come_in_rank_order_and_ranks_talk_to_each_other() -> None:
    assert run_ranks(3, sum_over_ranks, 10) == [33, 33, 33]


def test_a_rank_without_torch_distributed_has_the_callers_surroundings(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_ranks(1, describe_process, distributed=False, env={"COLOUR": "blue"})
    assert found == [(False, 1, str(tmp_path), "blue")]
    assert "[rank 0] hello from a rank" in capsys.readouterr().out


def test_an_error_of_one_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match="the second rank does not like this") as caught:
        run_ranks(2, raise_on_rank_one)
    first_report = str(caught.value).split("--- ")[1]
    assert first_report.startswith("rank 1 raised")
    assert "in raise_on_rank_one" in first_report


def test_a_hanging_rank_is_killed_and_its_stacks_are_shown() -> None:
    with pytest.raises(RanksFailed, match="rank 0 was still running") as caught:
        run_ranks(2, hang_on_rank_zero, timeout_s=1.0)
    assert "in hang_on_rank_zero" in str(caught.value)
    assert "rank 1" not in str(caught.value)


def test_a_death_that_was_allowed_is_a_result() -> None:
    assert run_ranks(2, die_on_rank_one, allow_death={1}) == ["alive", "killed by signal 9"]


def test_a_death_that_was_not_allowed_fails() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 died .*killed by signal 9"):
        run_ranks(2, die_on_rank_one)


def test_spawned_ranks_work_as_forked_ones() -> None:
    assert run_ranks(1, sum_over_ranks, 5, start="spawn") == [5]


def test_ranks_die_with_their_caller(tmp_path) -> None:
    path = tmp_path / "pid"
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r});"
        "from backstay.testing import run_ranks; from test_ranks import return_pid_and_wait;"
        f"run_ranks(1, return_pid_and_wait, {str(path)!r}, distributed=False)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        wait_until(lambda: path.exists() and path.read_text() != "")
        caller.kill()
    wait_until(lambda: not is_running(int(path.read_text())))


def test_nothing_is_left_of_a_call() -> None:
    run_ranks(1, sum_over_ranks, 0)
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    run_ranks(2, sum_over_ranks, 0)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)  # another process's doing can't be waited for otherwise
