"""Runs of the sft recipe on a tiny model for tests: started in new ranks, stopped at a chosen forward pass, compared bit for bit."""

import importlib
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from backstay import Catalog
from backstay.events import read_lines
from backstay.recipes import RECIPES
from backstay.testing.ranks import run_ranks
from backstay.testing.tiny_llm import chat, make_tokenizer, write_chats, write_tiny_llm
from backstay.training.packing import pack
from backstay.training.program import run_method

TOKENIZER = make_tokenizer()
SEQ_LEN = 192
LAUNCHER_PATIENCE_S = 1.5
BASE = {
    "data.seq_len": SEQ_LEN,
    "batch_size": 4,
    "epochs": 2,
    "optimizer.lr": 0.01,
    "optimizer.warmup_steps": 2,
    "log.samples": "true",
    "deterministic": "true",
    "checkpoint.every_steps": 2,
    "export.at_end": "false",
}


@dataclass(frozen=True)
class Stop:
    """Send a signal to one rank before its forward pass number `forward` (from 0; training and evaluation count)."""

    forward: int
    number: int = signal.SIGTERM
    rank: int = 0


@dataclass(frozen=True)
class Alarm:
    """Send a signal to one rank `delay_s` seconds after its start, or as soon as a step was logged; perhaps again and again."""

    delay_s: float
    number: int
    rank: int
    after_step: int | None = None
    repeat: int = 1
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def set(self, rank: int, out: Path) -> None:
        """Start to count, in a rank."""
        ring = self._ring if rank == self.rank else self._follow
        threading.Thread(target=ring, args=(out,), daemon=True).start()

    def _ring(self, out: Path) -> None:
        if self.after_step is None:
            time.sleep(self.delay_s)
        else:
            while max(records(out), default=0) < self.after_step:
                time.sleep(0.01)
        if self.number != signal.SIGUSR1:
            self._note(out).touch()
        for _ in range(self.repeat):
            os.kill(os.getpid(), self.number)
            time.sleep(0.1)

    def _follow(self, out: Path) -> None:
        """What a launcher does once one of its ranks is gone: end the others, if they do not end by themselves."""
        while not self._note(out).exists():
            time.sleep(0.02)
        time.sleep(LAUNCHER_PATIENCE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, out: Path) -> Path:
        return out.with_name(f"{out.name}.{self.key}")


def out_of(overrides: Iterable[str]) -> Path:
    """The output directory among overrides."""
    return Path(next(each for each in overrides if each.startswith("out="))[4:])


def make_inputs(
    home: Path, *, num_sequences: int = 20, is_packed: bool = False, attention_dropout: float = 0.1
) -> dict[str, Any]:
    """A model and data below `home`, as overrides; an epoch has `num_sequences` sequences."""
    write_tiny_llm(home / "model", attention_dropout=attention_dropout)
    num_samples = num_sequences
    if is_packed:
        while len(pack([num_tokens(n) for n in range(num_samples)], SEQ_LEN)) < num_sequences:
            num_samples += 1
    write_chats(home / "train.jsonl", num_samples)
    write_chats(home / "eval.jsonl", 5, seed=9)
    return {"model.path": home / "model", "data.train": home / "train.jsonl"}


def num_tokens(number: int) -> int:
    """Length of a chat of `write_chats`."""
    return len(TOKENIZER.apply_chat_template(chat(number), tokenize=True)["input_ids"])


def run_sft(
    out: Path,
    values: Mapping[str, Any],
    *,
    ranks: int = 1,
    stop: Stop | None = None,
    alarm: Alarm | None = None,
    recipe: str = "sft",
    timeout_s: float = 60.0,
) -> list[Any]:
    """Run the recipe in new processes; returns exit statuses, or how ranks died."""
    overrides = [f"{key}={value}" for key, value in {**BASE, **values, "out": out}.items()]
    return run_ranks(
        ranks,
        sft_rank,
        recipe,
        overrides,
        stop,
        alarm,
        timeout_s=timeout_s,
        allow_death=range(ranks),
    )


def sft_rank(
    rank: int, _: int, recipe: str, overrides: list[str], stop: Stop | None, alarm: Alarm | None
) -> int:
    """One rank of the recipe."""
    found = RECIPES[recipe]
    method = importlib.import_module(found.module).METHOD
    if stop is not None and stop.rank == rank:
        score = partial(stopping, method.score, stop, iter(range(10**9)))
        method = replace(method, score=score)
    if alarm is not None:
        alarm.set(rank, out_of(overrides))
    config = [] if recipe == "sft" else ["--config", str(found.config)]
    return run_method(method, [*config, *overrides])


def stopping(real: Any, stop: Stop, counter: Iterable[int], *args: Any) -> Any:
    """A real score, but the signal comes first when its time has come."""
    if next(iter(counter)) == stop.forward:
        os.kill(os.getpid(), stop.number)
    return real(*args)


def records(out: Path) -> dict[int, dict[str, Any]]:
    """What was logged for each step, by the last run that did it; timings left out."""
    kept = ("loss", "lr", "grad_norm", "samples", "eval_loss", "epoch")
    found: dict[int, dict[str, Any]] = {}
    for line in read_lines(out / "metrics.jsonl"):
        found.setdefault(line["step"], {}).update(
            {name: line[name] for name in kept if name in line}
        )
    return found


def steps_by_attempt(out: Path) -> list[list[int]]:
    """The steps that each start of the run did."""
    by_attempt: dict[int, list[int]] = {}
    for line in read_lines(out / "metrics.jsonl"):
        if "loss" in line:
            by_attempt.setdefault(line["attempt"], []).append(line["step"])
    return list(by_attempt.values())


def final_state(out: Path) -> dict[str, str]:
    """All that the newest checkpoint holds, as hashes of bytes by name; comparable between runs on any number of ranks."""
    entry = Catalog(out / "checkpoints").latest()
    assert entry is not None
    merged = out / "merged.pt"
    dcp_to_torch_save(entry.path / "weights", merged)
    flat = dict(flatten(torch.load(merged, weights_only=True)))
    state = json.loads((entry.path / "state.json").read_text())
    return {**flat, "step": str(entry.step), "sampler": json.dumps(state["parts"]["sampler"])}


def flatten(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    """Leaves of a tree by path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from flatten(inner, f"{path}.{name}")
    elif isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8)
        yield path, f"{value.dtype} {tuple(value.shape)} {hash(raw.numpy().tobytes())}"
    else:
        yield path, repr(value)
