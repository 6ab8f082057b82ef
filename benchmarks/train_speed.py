"""Tokens per second of the sft recipe beside `transformers.Trainer`: `python -m benchmarks.train_speed [--model DIR]`.

The same model, samples in the same order and batches, float32, AdamW without decay, gradient clipping, loss on the answers, one process with all cores; no
saves and no evaluation on either side. Each system runs in processes of its own, in turn, round after round. Times per step are the systems' own loop's, the
first steps left out; tokens count without padding. Two differences are the recipe's design: it computes logits only where there is a
loss, and it has no attention mask where a causal one is enough.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import common

SYSTEMS = ("recipe", "Trainer")
WARM_STEPS = 2


def main() -> int:
    """The benchmark."""
    parser = common.make_parser(__doc__, gb=None, rounds=3, ranks=None)
    parser.add_argument("--model", type=Path, help="a model directory (SmolLM2-135M-Instruct)")
    parser.add_argument("--steps", type=int, default=12, help="per round (12)")
    parser.add_argument("--batch", type=int, default=2, help="samples per step (2)")
    parser.add_argument("--seq-len", type=int, default=160, help="longest sample, in tokens (160)")
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.system:
        measure = measure_recipe if options.system == "recipe" else measure_trainer
        print(json.dumps(measure(options)))
        return 0
    with common.scratch(options.directory) as home:
        results = compare(options, home)
    common.print_machine()
    print_results(results)
    common.write_json(options.json, options, results)
    return 0


def compare(options: argparse.Namespace, home: Path) -> dict[str, list[dict[str, Any]]]:
    """All rounds of all systems."""
    from backstay.testing.docstrings import write_docstrings
    from backstay.testing.smollm2 import find_smollm2

    model = options.model or find_smollm2()
    data = write_docstrings(home / "data", max_prompt_chars=400).train
    results: dict[str, list[dict[str, Any]]] = {system: [] for system in SYSTEMS}
    for number in range(options.rounds):
        for system in SYSTEMS:
            common.say(f"round {number + 1} of {options.rounds}: {system}")
            command = [
                *(sys.executable, "-m", "benchmarks.train_speed", "--system", system),
                *("--model", str(model), "--data", str(data), "--steps", str(options.steps)),
                *("--batch", str(options.batch), "--seq-len", str(options.seq_len)),
                *("--directory", str(home / f"{system}-{number}")),
            ]
            done = subprocess.run(
                command,
                cwd=common.REPOSITORY,
                stdout=subprocess.PIPE,
                text=True,
                timeout=options.timeout_s,
                check=True,
            )
            results[system].append(json.loads(done.stdout.splitlines()[-1]))
    return results


def measure_recipe(options: argparse.Namespace) -> dict[str, Any]:
    """Run the recipe; its metrics say how long the steps took."""
    from backstay.events import read_lines
    from backstay.recipes import sft
    from backstay.training.program import run_method

    values = {
        "model.path": options.model,
        "data.train": options.data,
        "data.seq_len": options.seq_len,
        "data.packing": "false",
        "data.shuffle": "false",
        "data.too_long": "drop",
        "batch_size": options.batch,
        "micro_batch_size": options.batch,
        "max_steps": options.steps,
        "optimizer.schedule": "constant",
        "checkpoint.every_steps": "null",
        "export.at_end": "false",
        "log.samples": "false",
        "out": options.directory,
    }
    status = run_method(sft.METHOD, [f"{key}={value}" for key, value in values.items()])
    assert status == 0, f"the recipe ended with status {status}"
    lines = read_lines(options.directory / "metrics.jsonl")
    steps = [line for line in lines if "step_s" in line]
    tokens = [line["tokens_per_s"] * line["step_s"] for line in steps]
    return {
        "seconds": [line["step_s"] for line in steps],
        "tokens": [round(each) for each in tokens],
        "losses": [line["loss"] for line in steps],
    }


def measure_trainer(options: argparse.Namespace) -> dict[str, Any]:
    """Run `transformers.Trainer` on the same tokens."""
    import torch
    from torch.utils.data import SequentialSampler
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from backstay.training.tokens import Tokenizing, TokenStore, make_store

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    how = Tokenizing(seq_len=options.seq_len, too_long="drop", use_template=True)
    store = TokenStore(
        make_store(
            options.data,
            options.directory / "tokens",
            tokenizer=tokenizer,
            tokenizer_hash="",
            how=how,
        )
    )
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    marks: list[float] = []

    class Times(TrainerCallback):
        """Notes when each step ended."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    class InOrder(Trainer):
        """Takes the samples in the order of the file."""

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    def collate(rows: list[int]) -> dict[str, torch.Tensor]:
        found = [store[index] for index in rows]
        length = max(len(ids) for ids, _ in found)
        shape = (len(rows), length)
        ids = torch.full(shape, tokenizer.pad_token_id)
        labels, mask = torch.full(shape, -100), torch.zeros(shape, dtype=torch.long)
        for number, (own, learnt) in enumerate(found):
            values = torch.from_numpy(own.astype("int64"))
            ids[number, : len(own)], mask[number, : len(own)] = values, 1
            keep = torch.from_numpy(learnt.copy())
            labels[number, : len(own)] = torch.where(keep, values, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    arguments = TrainingArguments(
        output_dir=str(options.directory / "trainer"),
        per_device_train_batch_size=options.batch,
        max_steps=options.steps,
        learning_rate=2e-5,
        adam_beta2=0.95,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = InOrder(
        model=model,
        args=arguments,
        train_dataset=list(range(len(store))),  # type: ignore[arg-type]
        data_collator=collate,
        callbacks=[Times()],
    )
    marks.append(time.perf_counter())
    trainer.train()
    ends = range(0, options.steps * options.batch, options.batch)
    return {
        "seconds": [after - before for before, after in itertools.pairwise(marks)],
        "tokens": [sum(len(store[i][0]) for i in range(at, at + options.batch)) for at in ends],
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


def print_results(results: dict[str, list[dict[str, Any]]]) -> None:
    """A table, and the ratio of the two."""
    speeds = {
        system: [
            sum(each["tokens"][WARM_STEPS:]) / sum(each["seconds"][WARM_STEPS:]) for each in rounds
        ]
        for system, rounds in results.items()
    }
    rows = []
    for system, rounds in results.items():
        steps = [second for each in rounds for second in each["seconds"][WARM_STEPS:]]
        losses = rounds[0]["losses"]
        rows.append(
            [
                system,
                f"{common.median(speeds[system]):.1f}",
                common.spread(steps),
                f"{losses[0]:.4f}",
                f"{losses[-1]:.4f}",
            ]
        )
    common.print_table(["system", "tokens/s", "step", "first loss", "last loss"], rows)
    ratios = [mine / theirs for mine, theirs in zip(*speeds.values(), strict=True)]
    print(
        f"recipe / Trainer: {common.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f} over rounds)"
    )


if __name__ == "__main__":
    sys.exit(main())
