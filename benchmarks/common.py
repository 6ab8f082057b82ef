"""What the benchmarks share: trainings of a given size, the limits of disk and memory, what processes hold, tables.

Whatever allocates or measures here runs in a rank, with one compute thread, unless it says otherwise.
"""

import argparse
import contextlib
import ctypes
import io
import json
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from backstay.state import local_tensor
from backstay.testing.ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE_BYTES = 4096
PIECE_BYTES = 8 << 20
NUM_THREADS = 4
# A parameter and the two moments of AdamW, all float32.
BYTES_PER_PARAMETER = 12
HEAD_DIM = 32


# Trainings ------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block; its weights are what a checkpoint mostly consists of."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, sequence, dim] to the same shape."""
        qkv = self.qkv(self.norm_1(hidden)).unflatten(-1, (3, -1, HEAD_DIM))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.norm_2(hidden))))


class Gpt(nn.Module):
    """A small decoder without positions; `blocks` are what FSDP shards one by one."""

    def __init__(self, num_layers: int, dim: int, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, num_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] to logits [batch, sequence, token]."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@dataclass
class Training:
    """A sharded model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, tokens: Tensor) -> None:
        """One step on tokens [batch, sequence]."""
        logits = self.model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def gpt_of_bytes(num_bytes: int, *, num_layers: int = 12, num_tokens: int = 1024) -> Gpt:
    """A model on the meta device whose state with AdamW's has at least `num_bytes`."""
    dim = HEAD_DIM
    while (12 * num_layers * dim + 2 * num_tokens) * dim * BYTES_PER_PARAMETER < num_bytes:
        dim += HEAD_DIM
    with torch.device("meta"):
        return Gpt(num_layers, dim, num_tokens)


def shard(model: nn.Module, blocks: Iterable[nn.Module]) -> Training:
    """FSDP2 and AdamW; a model on the meta device gets random values."""
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    if is_empty:
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            local = local_tensor(parameter).detach()
            local.fill_(1.0) if parameter.ndim == 1 else local.normal_(std=0.02)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def make_training(num_bytes: int, *, with_state: bool = True) -> Training:
    """A training of at least `num_bytes`, its optimizer's state being there or not."""
    model = gpt_of_bytes(num_bytes)
    training = shard(model, model.blocks)
    if with_state:
        training.step(torch.randint(1024, (1, 9)))
    return training


def count_bytes(training: Training) -> int:
    """Bytes of parameters and moments of all ranks together."""
    return sum(p.numel() for p in training.model.parameters()) * BYTES_PER_PARAMETER


def nudge(training: Training) -> None:
    """A cheap optimizer step, on the vectors only, so that the next save has something new to store."""
    vectors = [p for p in training.model.parameters() if p.ndim == 1]
    for vector in vectors:
        vector.grad = torch.ones_like(vector)
    training.optimizer.step()
    training.optimizer.zero_grad()


# Limits ---------------------------------------------------------------------------------------------------------------


def on_threads(work: Callable[[int], None]) -> None:
    """Run `work(number)` on some threads; the first error is raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # raised by the caller
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def raw_write(path: Path, num_bytes: int) -> float:
    """Seconds that a plain program needs to write a file: O_DIRECT, large pieces, a few threads, fsync."""
    num_bytes = round_up(num_bytes)
    pattern = os.urandom(PIECE_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    began = time.perf_counter()
    try:
        os.posix_fallocate(fd, 0, num_bytes)

        def work(number: int) -> None:
            with mmap.mmap(-1, PIECE_BYTES) as piece, memoryview(piece) as view:
                view[:] = pattern
                for start, size in pieces(num_bytes, number):
                    with view[:size] as part:
                        check_size(os.pwrite(fd, part, start), size)

        on_threads(work)
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def raw_read(paths: Sequence[Path], *, direct: bool) -> float:
    """Seconds that a plain program needs to read files, past the page cache or out of it."""
    began = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        size = os.fstat(fd).st_size

        def work(number: int, fd: int = fd, num_bytes: int = size) -> None:
            with mmap.mmap(-1, PIECE_BYTES) as piece, memoryview(piece) as view:
                for start, length in pieces(round_up(num_bytes), number):
                    with view[:length] as part:
                        check_size(os.preadv(fd, [part], start), min(length, num_bytes - start))

        try:
            on_threads(work)
        finally:
            os.close(fd)
    return time.perf_counter() - began


def pieces(num_bytes: int, number: int) -> Iterator[tuple[int, int]]:
    """(start, size) of the pieces of one thread."""
    for start in range(number * PIECE_BYTES, num_bytes, NUM_THREADS * PIECE_BYTES):
        yield start, min(PIECE_BYTES, num_bytes - start)


def check_size(found: int, expected: int) -> None:
    """Benchmarks do not go on after short reads and writes."""
    if found != expected:
        raise OSError(f"{found} bytes were transferred, expected {expected}")


def round_up(num_bytes: int) -> int:
    """The next multiple of a page."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def copy_memory(num_bytes: int) -> float:
    """Seconds that one thread needs to copy so many bytes between buffers larger than the caches."""
    size = min(num_bytes, 256 << 20)
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    began = time.perf_counter()
    for _ in range(max(1, num_bytes // size)):
        target.copy_(source)
    return (time.perf_counter() - began) * num_bytes / (max(1, num_bytes // size) * size)


def data_files(directory: Path) -> list[Path]:
    """The data files of a checkpoint."""
    return sorted(directory.rglob("*.distcp"))


def evict(directory: Path) -> None:
    """Drop the files below a directory from the page cache."""
    for path in filter(Path.is_file, directory.rglob("*")):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cached_share(paths: Sequence[Path], *, num_probes: int = 256) -> float:
    """Which part of files is in the page cache, by probes that never touch the disk."""
    hits = probes = 0
    page = bytearray(PAGE_BYTES)
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        size = os.fstat(fd).st_size
        for start in range(0, size, max(PAGE_BYTES, size // num_probes)):
            probes += 1
            with contextlib.suppress(BlockingIOError):
                hits += os.preadv(fd, [page], start, os.RWF_NOWAIT) > 0
        os.close(fd)
    return hits / max(1, probes)


# Memory ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What processes held at one time: PSS of all, RSS of the largest process that a rank started."""

    at: float
    pss_bytes: int
    helper_rss_bytes: int


class MemoryWatch:
    """Samples the memory of ranks and all that they start, from a thread of the process that started the ranks.

    Args:
        folder: where each rank writes a file that has its process id for a name.
    """

    def __init__(self, folder: Path, *, every_s: float = 0.05) -> None:
        self.samples: list[Sample] = []
        self._folder, self._every_s = folder, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        folder.mkdir()

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def before(self, moment: float) -> int:
        """PSS at the last sample before a moment of the monotonic clock."""
        return [each.pss_bytes for each in self.samples if each.at <= moment][-1]

    def peak(self, since: float) -> int:
        """The largest PSS since a moment."""
        return max(each.pss_bytes for each in self.samples if each.at >= since)

    def helper_peak(self, since: float) -> int:
        """The largest RSS of a single helper since a moment."""
        return max(each.helper_rss_bytes for each in self.samples if each.at >= since)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            ranks = {int(path.name) for path in self._folder.iterdir()}
            if ranks:
                at = time.monotonic()
                found = {pid: rollup(pid) for pid in process_tree(ranks)}
                helpers = [rss for pid, (_, rss) in found.items() if pid not in ranks]
                pss = sum(pss for pss, _ in found.values())
                self.samples.append(Sample(at, pss, max(helpers, default=0)))


def process_tree(roots: Iterable[int]) -> set[int]:
    """Process ids of processes and of all their descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting.extend(children.get(pid, []))
    return found


def rollup(pid: int) -> tuple[int, int]:
    """PSS and RSS of a process in bytes; nothing of one that is gone."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * 1024
    return fields.get("Pss", 0), fields.get("Rss", 0)


def trim_memory() -> None:
    """Give freed memory back, so that what is allocated next shows as growth."""
    ctypes.CDLL(None).malloc_trim(0)


# Running and reporting ------------------------------------------------------------------------------------------------


def make_parser(doc: str, *, gb: float | None, rounds: int, ranks: int | None) -> Any:
    """A parser with the options that benchmarks have in common; None leaves one out."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if gb is not None:
        parser.add_argument("--gb", type=float, default=gb, help=f"size of the state ({gb:g})")
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks, help=f"processes ({ranks})")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"repetitions ({rounds})")
    parser.add_argument(
        "--directory", type=Path, help="where to write (a temporary directory on this disk)"
    )
    parser.add_argument("--json", type=Path, help="file for all numbers (none)")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="limit of each part (900)")
    return parser


@contextlib.contextmanager
def scratch(directory: Path | None) -> Iterator[Path]:
    """A new directory below the given one or on the disk of the repository, removed at the end."""
    if directory is None:
        directory = Path(tempfile.gettempdir())
        if directory.stat().st_dev != REPOSITORY.stat().st_dev:
            directory = REPOSITORY
    path = Path(tempfile.mkdtemp(prefix=".backstay-benchmark-", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def call_ranks(num_ranks: int, fn: Callable[..., Any], *args: object, **options: Any) -> list[Any]:
    """`run_ranks` without what ranks print: DCP's process logs a lot. After a failure it is in the error."""
    with contextlib.redirect_stdout(io.StringIO()):
        return run_ranks(num_ranks, fn, *args, **options)


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def barrier() -> None:
    """Wait for all ranks, if there are several."""
    if dist.is_initialized():
        dist.barrier()


def machine() -> dict[str, object]:
    """What was measured on."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor() -> str:
    """Name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """First column to the left, all others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]))


def print_machine() -> None:
    """One line on the machine."""
    print(", ".join(f"{name} {value}" for name, value in machine().items()))


def write_json(path: Path | None, options: argparse.Namespace, results: object) -> None:
    """Everything that was measured, if a file was asked for."""
    if path is None:
        return
    given = {name: str(value) for name, value in vars(options).items()}
    found = {"machine": machine(), "options": given, "results": results}
    path.write_text(json.dumps(found, indent=1) + "\n")


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else float("nan")


def seconds(value: float) -> str:
    """A time with three digits or so."""
    if value != value:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def spread(values: Sequence[float]) -> str:
    """A median time, with the range."""
    if len(values) < 2:
        return seconds(median(values))
    return f"{seconds(median(values))} ({seconds(min(values))}-{seconds(max(values))})"
