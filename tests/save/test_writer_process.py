"""The writer process: its life, its death, and what survives its trainer's."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import fake_trainer
import pytest
from fake_trainer import FakeTrainer, content, wait_until

from backstay.attempts import is_live, read_failure, record_failure
from backstay.catalog import Catalog
from backstay.errors import WriterDied
from backstay.points import Action
from backstay.save.messages import AbandonSave, Close, Committed, Failed, Written

Make = Callable[..., FakeTrainer]


def start_trainer(
    root: Path, mode: str, actions: tuple[Action, ...] = ()
) -> tuple[subprocess.Popen[str], int]:
    """A trainer process to be killed, and its writer's pid."""
    command = [
        sys.executable,
        fake_trainer.__file__,
        str(root),
        mode,
        json.dumps([asdict(one) for one in actions]),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def is_running(pid: int) -> bool:
    """Whether a process that is not our child runs; nobody may reap it here, so a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_save_is_committed_with_exact_bytes_and_hashes(trainer: FakeTrainer, root: Path) -> None:
    assert isinstance(trainer.save(3), Committed)
    entry = Catalog(root).get(3)
    assert (entry.path / "weights/__0_0.distcp").read_bytes() == content(3)
    assert entry.problems("full") == []
    assert [file.path for file in entry.manifest.files] == [
        "rng/rank-00000.safetensors",
        "weights/.metadata",
        "weights/__0_0.distcp",
    ]


def test_two_writers_commit_one_checkpoint(make_trainer: Make, root: Path) -> None:
    ranks = [make_trainer(rank=rank, world_size=2) for rank in range(2)]
    for one in ranks:
        one.submit(one.begin(5), 5, content(one.rank))
    assert all(isinstance(one.outcome(), Committed) for one in ranks)
    assert (root / "step-00000005/weights/__1_0.distcp").read_bytes() == content(1)
    assert Catalog(root).get(5).manifest.world_size == 2


def test_close_leaves_nothing_but_checkpoints(trainer: FakeTrainer, root: Path) -> None:
    trainer.save(1)
    assert trainer.writer.close() == 0
    assert os.listdir(root) == ["step-00000001"]
    assert trainer.writer.close() is None
    assert trainer.deaths.empty()


def test_unchanged_weights_are_reported(trainer: FakeTrainer) -> None:
    outcomes = [
        trainer.save(step, data)
        for step, data in ((1, content(1)), (2, content(1)), (3, content(3)))
    ]
    assert [outcome.unchanged for outcome in outcomes if isinstance(outcome, Committed)] == [
        False,
        True,
        False,
    ]


def test_a_writer_stays_small(make_trainer: Make) -> None:
    """Resident memory, mapped windows of the image included."""
    trainer = make_trainer(num_threads=4, chunk_bytes=4 << 20)
    trainer.save(1, bytes(64 << 20))
    status = Path(f"/proc/{trainer.writer.pid}/status").read_text()
    peak_kb = int(status.partition("VmHWM:")[2].split()[0])
    assert peak_kb < 40_000


def test_the_writer_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, backstay.save.writer_main, backstay.catalog; print({'torch', 'numpy', 'logging'} & {*sys.modules})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.strip() == "{'logging'}"


def test_a_staged_save_survives_its_trainer(root: Path) -> None:
    """SIGKILL after the submission; the checkpoint is committed, and its event written, all the same."""
    process, writer_pid = start_trainer(
        root, "submit", (hold("writer.received", root.parent / "gate"),)
    )
    wait_until((root.parent / "gate.reached").exists)
    kill(process)
    (root.parent / "gate").touch()
    wait_until(lambda: not is_running(writer_pid))
    assert Catalog(root).get(7).problems("full") == []
    event = json.loads((root / "events.jsonl").read_text())
    assert (event["step"], event["blocked_s"], event["outcome"]) == (7, 0.5, "committed")


@pytest.mark.parametrize("mode", ["begin", "forked"])
def test_a_save_that_was_not_staged_dies_with_its_trainer(root: Path, mode: str) -> None:
    """Also when a forked worker of the trainer lives on and holds the socket."""
    process, writer_pid = start_trainer(root, mode)
    kill(process)
    wait_until(lambda: not is_running(writer_pid))
    failure = read_failure(root, "0000000a-0001")
    assert failure is not None
    assert failure.cause == "the trainer of rank 0 ended before its state was staged"
    assert Catalog(root).list() == []
    assert not is_live(root, "0000000a-0001")


def test_signals_of_a_launcher_do_not_end_a_writer(trainer: FakeTrainer) -> None:
    trainer.save(1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(trainer.writer.pid, number)
    assert isinstance(trainer.save(2), Committed)
    assert os.getsid(trainer.writer.pid) == trainer.writer.pid


def test_a_writer_that_is_killed_is_noticed_and_can_be_replaced(
    make_trainer: Make, root: Path
) -> None:
    trainer = make_trainer(actions=(Action(point="write.done_record", kind="kill"),))
    attempt = trainer.begin(1)
    trainer.submit(attempt, 1, content(1))
    assert trainer.deaths.get(timeout=10) == -signal.SIGKILL
    with pytest.raises(WriterDied, match="gone"):
        trainer.writer.send(Close())
    fate = record_failure(root, attempt, step=1, rank=0, kind="WriterDied", cause="it was killed")
    assert fate == "failed"
    trainer.writer.config = fake_trainer.WriterConfig(
        **(asdict(trainer.writer.config) | {"actions": "[]"})
    )
    trainer.writer.restart()
    assert isinstance(trainer.save(1), Committed)


@pytest.mark.parametrize(("point", "victim"), [("write.first_chunk", 1), ("commit.rename", 0)])
def test_the_death_of_one_writer_fails_the_save_on_the_others(
    make_trainer: Make, point: str, victim: int
) -> None:
    killed = (Action(point=point, kind="kill", rank=victim),)
    ranks = [make_trainer(rank=rank, world_size=2, actions=killed) for rank in range(2)]
    for one in ranks:
        one.submit(one.begin(5), 5, content(one.rank))
    outcome = ranks[1 - victim].outcome()
    assert isinstance(outcome, Failed)
    assert (outcome.rank, outcome.kind) == (victim, "WriterDied")


def test_a_writer_gives_way_to_training(trainer: FakeTrainer) -> None:
    assert isinstance(trainer.save(1), Committed)
    expected = min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    assert os.getpriority(os.PRIO_PROCESS, trainer.writer.pid) == expected


def test_a_death_after_the_rename_leaves_a_checkpoint_on_all_ranks(
    make_trainer: Make, root: Path
) -> None:
    killed = (Action(point="commit.fsync_parent", kind="kill", rank=0),)
    ranks = [make_trainer(rank=rank, world_size=2, actions=killed) for rank in range(2)]
    attempts = [one.begin(5) for one in ranks]
    for one, attempt in zip(ranks, attempts, strict=True):
        one.submit(attempt, 5, content(one.rank))
    assert isinstance(ranks[1].outcome(), Committed)
    assert (
        record_failure(root, attempts[0], step=5, rank=0, kind="WriterDied", cause="?")
        == "committed"
    )


def test_an_abandoned_save_fails_on_all_ranks(make_trainer: Make) -> None:
    ranks = [make_trainer(rank=rank, world_size=2) for rank in range(2)]
    ranks[0].submit(ranks[0].begin(5), 5, content(0))
    ranks[1].writer.send(AbandonSave(attempt=ranks[1].begin(5), cause="no such tensor"))
    outcomes = [one.outcome() for one in ranks]
    assert {(one.rank, one.cause) for one in outcomes if isinstance(one, Failed)} == {
        (1, "no such tensor")
    }
    assert len(outcomes) == 2


def test_an_unexpected_error_is_reported_and_ends_the_writer(trainer: FakeTrainer) -> None:
    attempt = trainer.begin(1)
    trainer.writer.send(
        Written(
            attempt="",
            num_bytes=0,
            seconds=0,
            hash_seconds=0,
            cpu_seconds=0,
            digest="",
            direct=True,
        )
    )
    outcome = trainer.outcome()
    assert isinstance(outcome, Failed)
    assert (outcome.attempt, outcome.kind) == (attempt, "TypeError")
    assert trainer.deaths.get(timeout=10) == 70
    assert "Traceback" in trainer.notes[-1]


def test_many_saves_and_restarts_leak_nothing(
    trainer: FakeTrainer, num_fds: Callable[[], int]
) -> None:
    trainer.save(1)
    before = num_fds(), threading.active_count()
    for step in range(2, 102):
        assert isinstance(trainer.save(step), Committed)
    writer_fds = len(os.listdir(f"/proc/{trainer.writer.pid}/fd"))
    for _ in range(10):
        trainer.writer.restart()
    assert (num_fds(), threading.active_count()) == before
    assert writer_fds < 12


def hold(point: str, gate: Path) -> Action:
    return Action(point=point, kind="hold", path=str(gate), seconds=20)
