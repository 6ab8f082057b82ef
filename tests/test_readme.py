"""The README's snippets run as they stand, in the order in which a reader meets them, in one fresh directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backstay import Catalog

README = Path(__file__).parent.parent / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(cwd: Path, *command: str) -> str:
    """Run a program as a reader would; its output, or all that it said when it failed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=100, check=False, env=env
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reader")


def test_all_snippets_in_order(folder: Path) -> None:
    """The loop, run twice, then everything that looks at what it left."""
    loop, fsdp2, *others = SNIPPETS
    assert "TrainState(model=model, optimizer=optimizer, lr_scheduler=scheduler)" in loop
    first = run(folder, sys.executable, "-c", loop)
    assert [entry.step for entry in Catalog(folder / "runs/readme").list()] == [30, 40, 50]
    assert "5 saves" in first
    assert "0 saves" in run(folder, sys.executable, "-c", loop)
    assert "fully_shard" in fsdp2
    assert len(others) == 3
    for snippet in others:
        run(folder, sys.executable, "-c", snippet)
    assert (folder / "runs/readme.pt").exists()


def test_the_fsdp2_program_under_torchrun_resumes_on_another_number_of_ranks(folder: Path) -> None:
    (folder / "train.py").write_text(SNIPPETS[1])
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    run(folder, *torchrun, "--nproc-per-node", "2", "train.py")
    catalog = Catalog(folder / "runs/fsdp2")
    assert [entry.step for entry in catalog.list()] == [10, 20, 30]
    (folder / "train.py").write_text(SNIPPETS[1].replace("31", "41"))
    run(folder, *torchrun, "--nproc-per-node", "1", "train.py")
    latest = catalog.latest()
    assert latest is not None
    assert (latest.step, latest.manifest.world_size) == (40, 1)
