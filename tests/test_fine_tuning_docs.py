"""The commands in docs/fine-tuning.md run as they stand, one after the other, in one fresh directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

from backstay import Catalog
from backstay.testing.tiny_llm import write_tiny_llm

PAGE = Path(__file__).parent.parent / "docs" / "fine-tuning.md"
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_all_commands_in_order(tmp_path: Path) -> None:
    write_tiny_llm(tmp_path / "model", max_position_embeddings=2048)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    output = ""
    for command in COMMANDS:
        found = subprocess.run(
            ["bash", "-euc", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert found.returncode == 0, found.stdout + found.stderr
        output += found.stdout
    catalog = Catalog(tmp_path / "runs/first/checkpoints")
    assert [entry.step for entry in catalog.list()] == [6, 8]
    assert "going on after step 6 of 8" in output
    assert (tmp_path / "my-model" / "model.safetensors").exists()
    assert (tmp_path / "my.yaml").exists()
