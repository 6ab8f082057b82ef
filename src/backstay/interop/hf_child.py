"""Parent side of one background export: start its process, wait for it, say why it failed.

Runs in: the exporter's thread. Guarantees: the process is reaped, and killed at its time limit; it is in a session of its own and never
imports the user's `__main__`.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from backstay.interop.hf_options import ExportOptions
from backstay.interop.hf_source import Source

MAX_TAIL = 4000
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from backstay.interop.hf_main import main; main(sys.argv[1])"
)


def start_child(
    source: Source, *, companions: Path, options: ExportOptions
) -> subprocess.Popen[bytes]:
    """Start the process that exports a source.

    Raises:
        OSError: it cannot be started.
    """
    task = {
        "checkpoint": str(source.checkpoint),
        "out": str(source.out),
        "companions": str(companions),
        "options": asdict(options),
        "folder": str(source.folder),
        "trainer_pid": os.getpid(),
    }
    paths = [os.path.abspath(path) for path in sys.path]
    with source.errors_path.open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", BOOTSTRAP, json.dumps(paths), json.dumps(task)],
            pass_fds=[source.lock_fd],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=child_environment(),
        )


def child_environment() -> dict[str, str]:
    """The trainer's environment without its place among the ranks and its GPUs, and with one thread."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "HF_HUB_OFFLINE": "1",
    }


def wait_for_child(
    process: subprocess.Popen[bytes], source: Source, *, timeout_s: float
) -> str | None:
    """Wait for the end of an export; why it failed, None if it did not."""
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"not done after {timeout_s:g} s, so it was killed"
    if status == 0:
        return None
    how = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
    tail = source.errors_path.read_bytes()[-MAX_TAIL:].decode(errors="replace").strip()
    return f"{how}: {tail}" if tail else how
