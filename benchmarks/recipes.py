"""Every recipe on a real model, SmolLM2-135M-Instruct, for a few dozen updates: what it exists for, before and after; what its checkpoints cost.

    python -m benchmarks.recipes --steps 24

Data: functions of the standard library and their docstrings. Preferences: a function's own docstring against another one's. The teacher is what the
recipe `sft` made, so that one comes first.
"""

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backstay import Catalog
from backstay.events import read_events, read_lines
from backstay.testing.docstrings import write_docstrings
from backstay.testing.smollm2 import find_smollm2

MAX_PROMPT_CHARS = 420
NUM_TRAIN, NUM_HELD_OUT = 400, 20
GOAL = {"sft": "eval_loss", "dpo": "eval_accuracy", "kd": "eval_divergence"}
RATES = {"sft": 2e-5, "qat": 2e-5, "full_dpo": 2e-6, "kd": 2e-5}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    parser.add_argument(
        "--only",
        nargs="*",
        default=["sft", "lora_sft", "qat", "qat_lora", "full_dpo", "lora_dpo", "kd", "lora_kd"],
    )
    options = parser.parse_args()
    model, data = find_smollm2(), make_data(options.out / "data")
    table = Table(
        "recipe",
        "measure",
        "before",
        "after",
        "tokens/s",
        "blocked per save",
        "bytes per checkpoint",
        "of them adapter/",
    )
    for name in options.only:
        table.add_row(*measure(name, model, data, options))
        Console(width=150).print(table)


def make_data(home: Path) -> dict[str, Path]:
    """Samples and pairs, to train on and held out."""
    found = write_docstrings(home / "all", max_prompt_chars=MAX_PROMPT_CHARS)
    made = {}
    for kind, file, count in (
        ("train", found.train, NUM_TRAIN),
        ("eval", found.heldout, NUM_HELD_OUT),
    ):
        lines = file.read_text().splitlines()[: count + 1]
        rows = [json.loads(line) for line in lines]
        pairs = [
            {
                "prompt": row["messages"][:-1],
                "chosen": row["messages"][-1:],
                "rejected": other["messages"][-1:],
            }
            for row, other in pairwise(rows)
        ]
        for name, content in ((kind, rows[:-1]), (f"{kind}-pairs", pairs)):
            made[name] = home / f"{name}.jsonl"
            made[name].write_text("".join(json.dumps(row) + "\n" for row in content))
    return made


def measure(
    name: str, model: Path, data: dict[str, Path], options: argparse.Namespace
) -> list[str]:
    """One recipe; a row of the table."""
    method = name.split("_")[-1].replace("lora", "sft").replace("qat", "sft")
    suffix = "-pairs" if method == "dpo" else ""
    out = options.out / name
    values = {
        "model.path": model,
        "data.train": data[f"train{suffix}"],
        "data.eval": data[f"eval{suffix}"],
        "data.seq_len": 256,
        "data.packing": "false",
        "batch_size": 4,
        "micro_batch_size": 2,
        "max_steps": options.steps,
        "optimizer.lr": RATES.get(name, 2e-4 if method != "dpo" else 5e-5),
        "optimizer.warmup_steps": 4,
        "optimizer.schedule": "constant",
        "checkpoint.every_steps": 8,
        "eval.at_start": "true",
        "export.at_end": "true" if name == "sft" else "false",
        "out": out,
    }
    if method == "kd":
        values["teacher.path"] = options.out / "sft" / "export" / "final"
    command = [sys.executable, "-m", "backstay.cli", "train", name, "--nproc", "2"]
    subprocess.run([*command, *(f"{key}={value}" for key, value in values.items())], check=True)
    lines = read_lines(out / "metrics.jsonl")
    goal = GOAL[method]
    seen = [line[goal] for line in lines if goal in line]
    speeds = sorted(line["tokens_per_s"] for line in lines if "tokens_per_s" in line)
    blocked = sorted(event.blocked_s for event in read_events(out / "checkpoints"))
    entry = Catalog(out / "checkpoints").latest()
    assert entry is not None, "the run has saved"
    sizes = {path: path.stat().st_size for path in entry.path.rglob("*") if path.is_file()}
    adapter = sum(size for path, size in sizes.items() if "adapter" in path.parent.name)
    return [
        name,
        goal,
        f"{seen[0]:.4f}",
        f"{seen[-1]:.4f}",
        f"{speeds[len(speeds) // 2]:.0f}",
        f"{blocked[len(blocked) // 2] * 1e3:.0f} ms",
        f"{sum(sizes.values()) / 1e6:.1f} MB",
        f"{adapter / 1e6:.1f} MB",
    ]


if __name__ == "__main__":
    main()
