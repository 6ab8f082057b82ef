"""Around a recipe: process group, device, determinism, the output directory, and errors that every rank reports once.

Runs in: each rank's main thread. Guarantees: whatever is wrong with the input is one clear message and exit status 2, on every rank, before anything
is trained; one run at a time works in an output directory.
"""

import argparse
import fcntl
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from backstay.coordination import Coordination
from backstay.errors import BackstayError, InvalidArgument, RankMissing, UsedRoot
from backstay.training.config import keys_of, load_config
from backstay.training.signals import follow_launcher

log = logging.getLogger("backstay")
T = TypeVar("T")
BAD_INPUT = 2
# Rank 0 may be tokenizing while the others wait.
SETUP_TIMEOUT_S = 1800.0
# gloo has no error class of its own for this.
LOST_PEER = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
LOCK_NAME = ".lock"
LOCK_WAIT_S = 60.0


@dataclass(frozen=True)
class Runtime:
    """Where a rank runs.

    Attributes:
        ranks: all ranks, for small agreements on the CPU.
    """

    device: torch.device
    ranks: Coordination

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def together(self, fn: Callable[[], T], *, on_first_only: bool = False) -> T | None:
        """Call `fn` on all ranks, or on rank 0 for all; an error of any is raised on all.

        Returns:
            What `fn` returned here; None where it was not called.
        """
        result, error = None, None
        try:
            if self.is_first or not on_first_only:
                result = fn()
        except (BackstayError, OSError) as caught:
            error = caught
        self.ranks.raise_together(error)
        return result


class BadInput(Exception):
    """Carries what was wrong before training to the end of the program."""


def run_recipe(
    schema: type[Any], train: Callable[[Any, Runtime], int], argv: Sequence[str] | None = None
) -> int:
    """The main function of a recipe: parse, set up, train, tear down.

    Args:
        schema: the recipe's configuration.
        train: the recipe; raises BadInput from what went wrong before training.
        argv: command line without the program's name.

    Returns:
        The exit status: 0 finished, 2 bad input, 143 stopped by SIGTERM after saving; anything else is raised.
    """
    # Else tokenizers warns that loader workers are forked after tokenizing: they do not tokenize.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        follow_launcher()
    # Until the loop listens: a request to save that comes too early, or after the end, must not kill.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        config = parse(schema, argv)
    except BackstayError as error:
        return report_bad_input(error)
    runtime = start()
    try:
        return train(config, runtime)
    except BadInput as bad:
        return report_bad_input(bad.__cause__ or bad)
    except (RuntimeError, RankMissing) as error:
        if not is_about_others(error):
            raise
        print(
            f"error: rank {runtime.rank} ends because another rank is gone: {error}",
            file=sys.stderr,
        )
        return 1
    finally:
        runtime.ranks.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def is_about_others(error: Exception) -> bool:
    """Whether an error says no more than that another rank has ended: why, that rank or its launcher says."""
    return isinstance(error, RankMissing) or any(sign in str(error) for sign in LOST_PEER)


def parse(schema: type[Any], argv: Sequence[str] | None) -> Any:
    """The configuration from a command line."""
    parser = argparse.ArgumentParser(
        description=(schema.__doc__ or "").strip(),
        epilog="keys: " + ", ".join(keys_of(schema)),
    )
    parser.add_argument("--config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the file's values")
    given = parser.parse_args(argv)
    return load_config(schema, file=given.config, overrides=given.overrides)


def report_bad_input(error: BaseException) -> int:
    """Say what was wrong: once, though every rank knows."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return BAD_INPUT


def start() -> Runtime:
    """Join the process group that a launcher describes, or make one of a single rank."""
    logging.basicConfig(
        level=logging.INFO if int(os.environ.get("RANK", "0")) == 0 else logging.WARNING,
        format="%(message)s",
        stream=sys.stderr,
    )
    has_gpu = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if has_gpu
        else torch.device("cpu")
    )
    if has_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return Runtime(device, Coordination(timeout_s=SETUP_TIMEOUT_S))


def be_deterministic() -> None:
    """Only deterministic kernels: the same input gives the same bits, on a GPU as well, at some cost in speed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Costs time, and helps only those who read memory that nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def reseed(*keys: int) -> None:
    """Seed all generators from a few numbers.

    Done at each update, from seed, step and rank: then a stop in the middle of an update, which is done again after the resumption, draws nothing twice.
    """
    seed = xxhash.xxh3_64_intdigest(repr(keys).encode())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def take_directory(out: Path, wait_s: float = LOCK_WAIT_S) -> IO[str]:
    """Make an output directory and keep every other run out of it, until the returned file is closed or this process ends.

    Raises:
        InvalidArgument: it cannot be written.
        UsedRoot: another run works there, and goes on doing so for `wait_s` seconds.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / LOCK_NAME).open("a+")
    except OSError as error:
        raise InvalidArgument(
            f"out={out}: cannot be written: {error.strerror}; choose another directory"
        ) from error
    deadline = time.monotonic() + wait_s
    is_told = False
    while True:
        try:
            # Of the process, not of the file: a forked loader worker does not keep it.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            owner = read_owner(lock)
            if time.monotonic() > deadline:
                lock.close()
                raise UsedRoot(
                    f"{out}: another run works there ({owner}); wait for its end, or choose another directory"
                ) from None
            if not is_told:
                log.warning("%s: waiting for another run to end (%s)", out, owner)
                is_told = True
            time.sleep(0.1)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}")
    lock.flush()
    return lock


def read_owner(lock: IO[str]) -> str:
    """Who holds a directory."""
    lock.seek(0)
    return lock.read().strip() or "unknown process"
