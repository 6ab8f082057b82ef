"""Field cases of theme A: liveness and isolation of asynchronous saves."""

import os
import resource
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from loops import train_state
from torch import nn

from backstay import Catalog, Checkpointer, TrainState, restore
from backstay.testing import Gate, inject, run_ranks, slow_at
from backstay.testing.models import make_training, train_step


def tiny(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    return model


def test_collectives_of_training_and_of_saving_never_meet(tmp_path: Path) -> None:
    """P01: a background save and the trainer share one process group and deadlock."""
    assert run_ranks(2, save_among_collectives, tmp_path) == [True, True]


def save_among_collectives(rank: int, world_size: int, root: Path) -> bool:
    with Checkpointer(root, TrainState(model=tiny())) as checkpointer:
        for step in range(40):
            checkpointer.save(step)
            for number in range(5):
                time.sleep(0.004 * ((rank + number + step) % 2))
                value = torch.tensor([rank + number])
                dist.all_reduce(value)
                assert value.item() == 2 * number + 1
            dist.barrier()
            checkpointer.wait()
    return len(Catalog(root).list()) == 40


def test_two_checkpointers_save_in_a_row_with_one_rank_late(tmp_path: Path) -> None:
    """P02: two saves in a row take different start-up paths per rank."""
    assert run_ranks(2, save_twice_in_a_row, tmp_path, timeout_s=30) == [True, True]


def save_twice_in_a_row(rank: int, world_size: int, root: Path) -> bool:
    with (
        Checkpointer(root / "model", TrainState(model=tiny())) as first,
        Checkpointer(root / "other", TrainState(model=tiny())) as second,
    ):
        one = first.save(1)
        if rank == 1:
            one.wait(20)
        other = second.save(1)
        return one.wait(20).exists() and other.wait(20).exists()


def test_no_port_is_opened_and_two_jobs_run_beside_each_other(tmp_path: Path) -> None:
    """P03: a port is chosen, freed, and stolen before it is bound. The writers have none."""
    assert run_ranks(2, count_ports_of_writers, tmp_path) == [(2, 0), (2, 0)]


def count_ports_of_writers(rank: int, world_size: int, root: Path) -> tuple[int, int]:
    before = children()
    with (
        Checkpointer(root / "a", TrainState(model=tiny())) as one,
        Checkpointer(root / "b", TrainState(model=tiny())) as other,
    ):
        one.save(1)
        other.save(1)
        one.wait()
        writers = children() - before
        return len(writers), len(
            tcp_inodes() & {inode for pid in writers for inode in sockets(pid)}
        )


def tcp_inodes() -> set[str]:
    """Inodes of all TCP sockets of the machine."""
    files = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    return {line.split()[9] for file in files for line in file.read_text().splitlines()[1:]}


def children() -> set[int]:
    """Processes that this one started, in whatever session they are."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid for pid in pids if parent(pid) == os.getpid()}


def sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except FileNotFoundError:
        return -1


def test_descriptors_do_not_grow_with_tensors_or_saves(tmp_path: Path) -> None:
    """P04: one descriptor per tensor runs the trainer out of file descriptors."""
    counts = run_ranks(1, save_with_few_descriptors, tmp_path, distributed=False)[0]
    assert counts[0] == counts[-1]


def save_with_few_descriptors(rank: int, world_size: int, root: Path) -> list[int]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    model = nn.ParameterList(torch.rand(4) for _ in range(400))
    counts = []
    with Checkpointer(root, TrainState(model=model)) as checkpointer:
        for step in range(5):
            checkpointer.save(step)
            checkpointer.wait()
            counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_a_save_in_the_background_leaves_the_interpreter_to_the_trainer(tmp_path: Path) -> None:
    """P05: a background thread starves the trainer through the GIL. 3,000 tensors; the writer is held in the middle."""
    model = nn.ParameterList(torch.rand(8) for _ in range(3000))
    with (
        Gate(tmp_path / "gate", "writer.received", nth=2) as gate,
        inject(gate.action),
        Checkpointer(tmp_path / "run", TrainState(model=model)) as checkpointer,
    ):
        checkpointer.save(1).wait(20)
        ratios = []
        idle = step_time()
        pending = checkpointer.save(2)
        gate.wait_reached()
        for _ in range(3):
            ratios.append(step_time() / idle)
        assert not pending.committed.done()
        gate.open()
    assert min(ratios) <= 2


def step_time() -> float:
    """Median time of a fixed piece of training-like work."""
    left, right = torch.rand(64, 64), torch.rand(64, 64)
    times = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(5):
            left = torch.tanh(left @ right)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def test_saves_close_together_then_a_load_drain_in_order(tmp_path: Path) -> None:
    """P06: a synchronous save after asynchronous ones, or three saves close together, hang."""
    assert run_ranks(2, save_without_waiting, tmp_path, timeout_s=40) == [True, True]


def save_without_waiting(rank: int, world_size: int, root: Path) -> bool:
    training = make_training("fsdp2")
    positions = []
    with (
        inject(slow_at("write.last_chunk", 0.3)),
        Checkpointer(root, train_state(training)) as checkpointer,
    ):
        for step in range(1, 5):
            train_step(training)
            positions.append(training.sampler.position)
            checkpointer.save(step)
        checkpointer.wait()
        assert checkpointer.restore(3) == 3
        assert training.sampler.position == positions[2]
    for step in range(1, 5):
        assert restore(root, train_state(training), step=step) == step
        assert training.sampler.position == positions[step - 1]
    return True
