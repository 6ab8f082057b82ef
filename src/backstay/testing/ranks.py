"""Run a function as the ranks of a gloo process group, each in a new process, with a time limit.

Runs in: the calling process; what happens in a rank is in `rank_process`.
Guarantees: no rank outlives the call, or the calling process; a rank that hangs is killed and its stacks are reported; files of
the call are gone afterwards. Processes that a rank started itself (writers) are left alone.
Assumes: Linux; one call at a time in a process.

A new process that imports torch and what DCP and FSDP need takes seconds, so ranks are forked from a server process that has
imported all that and done nothing else: a rank then starts in a fraction of a second. The server starts with the first call and ends with the caller. It never
touches a GPU, so its ranks may. What ranks of `start="forkserver"` share although separate processes do not: the seed of
`hash(str)`, hence the order of sets. Atexit hooks do not run in them. `start="spawn"` has neither limit.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from backstay.errors import InvalidArgument
from backstay.testing.rank_process import RankFiles, RankTask, rank_main

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

PRELOADED = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer otherwise
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "backstay.testing.rank_process",
)
# What the caller has imported by then, its ranks will probably need: a test module imports pytest.
PRELOADED_IF_USED = frozenset({"pytest", "backstay.recipes.sft"})
# Once a rank has failed, the others can hardly succeed; they get this long to say how they fail.
GRACE_S = 10.0
# What a killed rank gets to write its stacks, which takes milliseconds.
STACKS_S = 3.0


class RanksFailed(AssertionError):
    """Some ranks raised, died or did not end; the message holds what is known of each, first failure first."""


@dataclass(kw_only=True)
class Rank:
    """A rank's process as the caller sees it."""

    rank: int
    process: ForkServerProcess | SpawnProcess
    files: RankFiles
    may_die: bool
    ended_at: float | None = None

    @property
    def failed(self) -> bool:
        code = self.process.exitcode
        return code is None or (code != 0 and not (self.may_die and not self.files.error.exists()))


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: object,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    distributed: bool = True,
    allow_death: Collection[int] = (),
    start: Literal["forkserver", "spawn"] = "forkserver",
) -> list[Any]:
    """Call `fn(rank, num_ranks, *args)` in `num_ranks` new processes and return the results in rank order.

    Each rank sees the environment that torchrun would give it, the caller's working directory and `sys.path`, and computes with
    one thread; gloo is initialised before `fn` and shut down after it. What ranks print is printed when all have ended. A script that
    calls this needs the usual `if __name__ == "__main__":`, because ranks import the script for what it defines.

    Args:
        fn: picklable by reference, so defined at the top of a module; so must be `args` and results picklable.
        timeout_s: limit for the whole call, counted from when all processes run.
        env: added to the caller's environment.
        distributed: whether to initialise torch.distributed; without it, ranks know nothing of each other.
        allow_death: ranks that may die without raising. Their result is then "killed by signal 9" or "exited with code 3".
        start: "spawn" pays for imports in each rank, but shares nothing and runs atexit hooks.

    Raises:
        RanksFailed: a rank raised, died, or was still running at the end.
    """
    if num_ranks < 1:
        raise InvalidArgument(f"expected at least one rank, got num_ranks={num_ranks}")
    context = _context(start)
    store = _serve_store() if distributed else None
    with tempfile.TemporaryDirectory(prefix="backstay-ranks-") as folder:
        payload = Path(folder) / "call"
        payload.write_bytes(pickle.dumps((fn, args)))
        ranks = []
        try:
            for rank in range(num_ranks):
                files = RankFiles(Path(folder), rank)
                task = RankTask(
                    rank=rank,
                    world_size=num_ranks,
                    payload=payload,
                    files=files,
                    cwd=os.getcwd(),
                    env=_environment(rank, num_ranks, env or {}, store),
                    timeout_s=timeout_s if store else None,
                )
                process = context.Process(target=rank_main, args=(task,), name=f"rank-{rank}")
                ranks.append(
                    Rank(rank=rank, process=process, files=files, may_die=rank in allow_death)
                )
                process.start()
            _wait(ranks, timeout_s)
        finally:
            _kill([rank for rank in ranks if rank.process.is_alive()])
        return _results(ranks, fn, timeout_s)


def _context(start: str) -> Any:
    context = multiprocessing.get_context(start)
    if start == "forkserver":
        context.set_forkserver_preload([*PRELOADED, *(PRELOADED_IF_USED & {*sys.modules})])
        from multiprocessing.forkserver import ensure_running

        ensure_running()  # it imports torch while this process may be doing the same
    return context


def _serve_store() -> "TCPStore":
    """The rendezvous store, here as in torchrun's agent: it survives the death of any rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def _environment(
    rank: int, num_ranks: int, extra: Mapping[str, str], store: "TCPStore | None"
) -> dict[str, str]:
    """The caller's environment, and for a distributed rank what torchrun sets."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if store is not None:
        env |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    return env | dict(extra)


def _wait(ranks: list[Rank], timeout_s: float) -> None:
    """Return when all ranks have ended, or when waiting any longer makes no sense."""
    begin = time.monotonic()
    deadline = begin + timeout_s
    running: dict[object, Rank] = {rank.process.sentinel: rank for rank in ranks}
    while running and (left_s := deadline - time.monotonic()) > 0:
        for sentinel in wait([rank.process.sentinel for rank in running.values()], left_s):
            rank = running.pop(sentinel)
            rank.process.join()
            rank.ended_at = time.monotonic() - begin
            if rank.failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _kill(ranks: list[Rank]) -> None:
    """Kill ranks: first with SIGABRT, at which faulthandler writes their stacks, then for good."""
    alive = {rank.process.pid: rank.process for rank in ranks if rank.process.pid is not None}
    for pid in alive:
        with suppress(ProcessLookupError):  # it may end at any moment
            os.kill(pid, signal.SIGABRT)
    deadline = time.monotonic() + STACKS_S
    for process in alive.values():
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()


def _results(ranks: list[Rank], fn: Callable[..., Any], timeout_s: float) -> list[Any]:
    failed = [rank for rank in ranks if rank.ended_at is None or rank.failed]
    if failed:
        failed.sort(key=lambda rank: (rank.ended_at is None, rank.ended_at, rank.rank))
        name = getattr(fn, "__qualname__", repr(fn))
        head = f"{len(failed)} of {len(ranks)} ranks failed in {name} (limit {timeout_s:g} s)"
        raise RanksFailed("\n\n".join([head, *(_report(rank) for rank in failed)]))
    for rank in ranks:
        for line in rank.files.read(rank.files.output).splitlines():
            print(f"[rank {rank.rank}] {line}")
    return [_result(rank) for rank in ranks]


def _result(rank: Rank) -> Any:
    if rank.process.exitcode != 0:
        return _death(rank)
    return pickle.loads(rank.files.result.read_bytes())


def _death(rank: Rank) -> str:
    code = rank.process.exitcode or 0
    return f"killed by signal {-code}" if code < 0 else f"exited with code {code}"


def _report(rank: Rank) -> str:
    """What is known of a rank that failed."""
    parts = [f"--- rank {rank.rank} {_fate(rank)}"]
    if rank.files.error.exists():
        parts.append(rank.files.read(rank.files.error))
    else:
        # faulthandler ends with the names of all extension modules
        parts.append(rank.files.read(rank.files.stacks).split("\nExtension modules:")[0])
    if output := rank.files.read(rank.files.output):
        parts.append(f"It had printed:\n{output[-8000:]}")
    return "\n".join(part.strip("\n") for part in parts if part.strip())


def _fate(rank: Rank) -> str:
    if rank.ended_at is None:
        return "was still running and has been killed. Its threads were in:"
    if rank.files.error.exists():
        return f"raised after {rank.ended_at:.1f} s:"
    return f"died after {rank.ended_at:.1f} s ({_death(rank)})"
