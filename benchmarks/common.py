"""How the benchmarks run and report: options, ranks, tables, JSON, the machine."""

import argparse
import contextlib
import io
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backstay.testing.ranks import run_ranks

REPOSITORY = Path(__file__).resolve().parent.parent


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
