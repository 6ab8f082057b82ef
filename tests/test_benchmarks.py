"""Each benchmark runs to its end at a tiny size and prints its table; what it measures is nobody's test."""

import subprocess
import sys
from pathlib import Path

import pytest

from backstay.testing.tiny_llm import write_tiny_llm

REPOSITORY = Path(__file__).parent.parent
RUNS = {
    "save": (["--gb", "0.01", "--saves", "2", "--pause-s", "0", "--forward-s", "0"], "blocked"),
    "load": (["--gb", "0.01"], "backstay.restore"),
    "step_time": (["--models", "tiny", "--tensors", "20", "--steps", "2", "--every", "1"], "each"),
    "train_speed": (["--steps", "4", "--seq-len", "500"], "recipe / Trainer"),
    "plan": (["--world-sizes", "2", "--real-sizes", "1"], "joint plan"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs_at_a_tiny_size(tmp_path: Path, name: str) -> None:
    options, expected = RUNS[name]
    if name == "save":
        options = [*options, "--systems", "backstay, overlap", "dcp.save"]
    if name == "train_speed":
        options = [*options, "--model", str(write_tiny_llm(tmp_path / "model"))]
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--rounds", "1"]
    found = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert expected in found.stdout
    assert (tmp_path / "found.json").stat().st_size > 100
