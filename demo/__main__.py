"""Fine-tune a real language model on two ranks, kill one in the middle of a save, go on with the same command, and show what that cost: nothing.

Everything it writes is below `runs/demo`, which it makes anew each time; the converted model is kept in the user's cache.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backstay import Catalog
from backstay.events import read_events, read_lines
from backstay.testing.docstrings import write_docstrings
from backstay.testing.smollm2 import find_smollm2
from demo.generate import Written, write_docstring
from demo.run import Kill, run, run_and_kill

CONFIG = Path(__file__).parent / "sft.yaml"
MAX_PROMPT_CHARS = 420
NUM_TRAIN, NUM_HELD_OUT = 400, 20
console = Console(highlight=False)


def main() -> int:
    """The whole demonstration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where it works")
    out = parser.parse_args().out
    began = time.monotonic()
    if out.exists():
        say(f"removing the demonstration before in {out}")
        shutil.rmtree(out)
    say(
        "preparing SmolLM2-135M-Instruct (converted once) and the data: functions of the standard library -> their docstrings"
    )
    model = find_smollm2()
    train, held_out = make_data(out / "data")
    command = [
        *(sys.executable, "-m", "backstay.cli", "train", "sft", "--nproc", "2"),
        *("--config", str(CONFIG)),
        *(f"model.path={model}", f"data.train={train}", f"data.eval={held_out}", f"out={out}"),
    ]
    say(f"first start: {shlex.join(['backstay', *command[3:]])}")
    kill = run_and_kill(command, out, rank=1)
    say(
        f"rank {kill.rank} (process {kill.pid}) got SIGKILL while step {kill.saving} was being written, after step {kill.trained}"
    )
    say("second start: the same command")
    status = run(command)
    if status:
        say(f"the second start ended with status {status}")
        return status
    say("the exported model, loaded with stock transformers")
    example = json.loads(held_out.read_text().splitlines()[0])
    before, after = (write_docstring(path, example) for path in (model, out / "export" / "final"))
    is_right = show(out, kill, example, (before, after))
    say(f"{time.monotonic() - began:.0f} s in all")
    return 0 if is_right else 1


def make_data(home: Path) -> tuple[Path, Path]:
    """Training and held-out samples, as many as fit the demonstration."""
    found = write_docstrings(home, max_prompt_chars=MAX_PROMPT_CHARS)
    files = []
    for file, count in ((found.train, NUM_TRAIN), (found.heldout, NUM_HELD_OUT)):
        few = file.with_name(f"few-{file.name}")
        few.write_text("".join(file.read_text().splitlines(keepends=True)[:count]))
        files.append(few)
    return files[0], files[1]


def show(
    out: Path, kill: Kill, example: dict[str, object], written: tuple[Written, Written]
) -> bool:
    """Print the results; whether all is as promised."""
    lines = read_lines(out / "metrics.jsonl")
    first, second = (
        {line["step"]: line for line in lines if line["attempt"] == attempt and "loss" in line}
        for attempt in (1, 2)
    )
    resumed_at = min(second) - 1
    both = sorted(first.keys() & second.keys())
    equal = [step for step in both if first[step]["loss"] == second[step]["loss"]]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    saves = [event for event in read_events(out / "checkpoints") if event.outcome == "committed"]
    committed = [entry.step for entry in Catalog(out / "checkpoints").list()]
    by_trainer = [event for event in saves if not event.trainer_gone]

    table = Table(show_header=False, title="What happened")
    table.add_row(
        "killed",
        f"rank {kill.rank}, in the middle of writing step {kill.saving}, after step {kill.trained}",
    )
    fate = (
        "committed all the same: the writers outlived rank 1"
        if resumed_at == kill.saving
        else "given up"
    )
    table.add_row(f"the save of step {kill.saving}", fate)
    table.add_row("resumed after", f"step {resumed_at}")
    table.add_row(
        "steps done twice",
        f"{', '.join(map(str, both))}: {len(equal)} of {len(both)} losses equal to the last bit",
    )
    for step in both:
        table.add_row("", f"step {step}: {first[step]['loss']!r} | {second[step]['loss']!r}")
    table.add_row("checkpoints there now", ", ".join(f"step {step}" for step in committed))
    blocked = [event.blocked_s * 1e3 for event in by_trainer]
    table.add_row("training blocked per save", ", ".join(f"{ms:.1f} ms" for ms in blocked))
    size = max(event.num_bytes for event in saves)
    speeds = ", ".join(f"{2 * event.gb_per_s:.2f}" for event in by_trainer)
    table.add_row(
        "written per save",
        f"{size / 1e9:.2f} GB at {speeds} GB/s by both ranks (held back to 0.09 GB/s)",
    )
    lost_s = sum(event.blocked_s + event.drained_s for event in by_trainer)
    trained_s = sum(line["step_s"] for line in lines if "step_s" in line)
    table.add_row("training time lost to saves", f"{lost_s:.3f} s of {trained_s:.0f} s")
    table.add_row(
        "loss on held-out docstrings", f"{held_out[0]:.4f} before, {held_out[-1]:.4f} after"
    )
    console.print(table)

    table = Table(title=f"A docstring for a held-out function, {example['id']}", show_lines=True)
    for name in ("its own", "before", "after"):
        table.add_column(name, ratio=1)
    own = str(example["messages"][-1]["content"])  # type: ignore[index]
    table.add_row(own, written[0].text, written[1].text)
    console.print(table)
    is_right = (
        bool(both) and equal == both and resumed_at == kill.saving and held_out[-1] < held_out[0]
    )
    if not is_right:
        say("that is not as it should be")
    return is_right


def say(text: str) -> None:
    """A line of the demonstration's own."""
    console.print(f"[bold]demo:[/bold] {text}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
