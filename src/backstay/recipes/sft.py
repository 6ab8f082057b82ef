"""Supervised fine-tuning: any Hugging Face causal LM on chats, or on prompts with completions.

    backstay train sft --nproc 2 model.path=DIR data.train=chats.jsonl out=runs/first
    torchrun --nproc-per-node 8 -m backstay.recipes.sft --config my.yaml optimizer.lr=1e-5

The same command again goes on from the newest checkpoint. Weights, optimizer, data position and random numbers come back bit for bit, so the
result is that of a run that was never interrupted.
"""

import logging
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from backstay.checkpointer import Checkpointer
from backstay.errors import BackstayError, ConfigError, Diverged, RankMissing
from backstay.interop.hf import Exporter, save_companions
from backstay.load.restore import restore
from backstay.policies import RetentionPolicy, SavePolicy
from backstay.state import TrainState
from backstay.training.batches import (
    Collate,
    DataConfig,
    MicroBatch,
    Sequences,
    load_batches,
    plan_eval,
)
from backstay.training.config import MISSING, fixed, to_plain, to_yaml
from backstay.training.exports import (
    ExportConfig,
    export_at_end,
    export_when_committed,
    wait_for_exports,
)
from backstay.training.losses import token_loss
from backstay.training.metrics import Clock, LogConfig, Metrics, memory_gb
from backstay.training.model import ModelConfig, ModelFiles
from backstay.training.optim import (
    OptimizerConfig,
    clip_gradients,
    make_optimizer,
    rate_at,
    set_rate,
)
from backstay.training.parallel import ParallelConfig
from backstay.training.prepare import (
    TokenizedData,
    check_context,
    check_documents,
    fill_base,
    prepare_data,
    prepare_files,
    prepare_model,
    prepare_sampler,
)
from backstay.training.resume import AUTO, Earlier, check_changes, find_earlier
from backstay.training.runtime import (
    BadInput,
    Runtime,
    be_deterministic,
    reseed,
    run_recipe,
    take_directory,
)
from backstay.training.sampler import BatchShape, ResumableSampler
from backstay.training.signals import STOPPED, StopSignals

log = logging.getLogger("backstay")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and which stay."""

    every_steps: int | None = 100
    every_s: float | None = None
    keep_last: int | None = 2
    # keep the so many with the lowest eval_loss, too
    keep_best: int | None = None
    # "sync" waits until each save is on disk
    mode: Literal["async", "sync"] = "async"
    staging: Literal["overlap", "block"] = "overlap"
    # limit for each rank's writer; 0 is none
    bandwidth_bytes_per_s: int = 0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """When the loss on `data.eval` is measured; always at the end."""

    every_steps: int | None = None
    at_start: bool = False


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Supervised fine-tuning of a causal LM."""

    # directory for checkpoints/, metrics.jsonl, config.yaml and export/
    out: str = MISSING
    seed: int = fixed(0)
    # auto: go on from the newest checkpoint in `out`; never: refuse if there is one; or the path of a checkpoint
    resume: str = AUTO
    # resume although model, data or seed have changed
    allow_changes: bool = False
    # same bits on every run, on GPUs too; slower there
    deterministic: bool = False
    epochs: int = 1
    # stop after so many updates
    max_steps: int | None = None
    # samples (packed: sequences) per update, over all ranks
    batch_size: int = 8
    # of them per rank and forward pass
    micro_batch_size: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=lambda: DataConfig(train=()))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.epochs < 1 or (self.max_steps is not None and self.max_steps < 1):
            raise ConfigError(
                f"expected epochs >= 1 and max_steps >= 1 or null; found {self.epochs} and {self.max_steps}"
            )


@dataclass
class Job:
    """All that the loop works with.

    Attributes:
        end: position of the sampler when everything has been trained on.
        earlier: what the run goes on from.
    """

    files: ModelFiles
    data: TokenizedData
    sampler: ResumableSampler
    shape: BatchShape
    end: int
    model: nn.Module
    optimizer: Optimizer
    state: TrainState
    earlier: Earlier | None
    metrics: Metrics
    checkpoints: Path
    exports: Path
    companions: Path


def train(config: SftConfig, run: Runtime) -> int:
    """Train to the end, or until SIGTERM; returns the exit status."""
    out = Path(config.out)
    try:
        lock = run.together(lambda: take_directory(out), on_first_only=True)
        job = prepare(config, run)
    except RankMissing:
        raise  # it died, whatever its input
    except BackstayError as error:
        raise BadInput from error
    try:
        return run_loop(config, run, job)
    finally:
        job.metrics.close()
        if lock is not None:
            lock.close()


def prepare(config: SftConfig, run: Runtime) -> Job:
    """Check all that was given, and build what the loop needs.

    Raises:
        BackstayError: on all ranks; nothing was changed.
    """
    out = Path(config.out)
    if config.deterministic:
        be_deterministic()
    files = prepare_files(config.model, config.data.pad_token, out, run)
    run.together(lambda: check_context(files, config.data.seq_len))
    data = prepare_data(config.data, files, out / "tokens", run)
    shape = BatchShape(config.batch_size, config.micro_batch_size, run.rank, run.world_size)
    sampler = run.together(
        lambda: prepare_sampler(config.data, data, seed=config.seed, shape=shape)
    )
    assert sampler is not None, "a rank without it has raised"

    identity = {**files.identity(), "data": sorted(data.names.values())}
    plain = to_plain(config)
    earlier = find_earlier(out / "checkpoints", config.resume, run.ranks)
    if earlier is not None:
        changes = check_changes(SftConfig, earlier, plain, identity, allow=config.allow_changes)
        for change in changes:
            log.info("changed since the checkpoint: %s", change)

    reseed(config.seed)
    model = prepare_model(files, config.model, config.parallel, run)
    if earlier is None:
        fill_base(model, files, seed=config.seed, run=run)
    optimizer = make_optimizer(model, config.optimizer)
    # "evaluated" is the last step whose evaluation came to its end.
    state = TrainState(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        extra={"config": plain, "identity": identity, "evaluated": -1},
    )
    metrics = run.together(lambda: Metrics(out, config.log, is_active=run.is_first))
    assert metrics is not None, "a rank without it has raised"
    job = Job(
        files=files,
        data=data,
        sampler=sampler,
        shape=shape,
        end=config.epochs * sampler.epoch_size,
        model=model,
        optimizer=optimizer,
        state=state,
        earlier=earlier,
        metrics=metrics,
        checkpoints=out / "checkpoints",
        exports=out / "export",
        companions=out / "companions",
    )
    run.together(lambda: write_companions(config, job), on_first_only=True)
    return job


def write_companions(config: SftConfig, job: Job) -> None:
    """Put down what belongs to the run beside its checkpoints: the configuration, and what every export needs."""
    (Path(config.out) / "config.yaml").write_text(to_yaml(config))
    save_companions(
        job.companions,
        config=job.files.config,
        generation_config=job.files.generation_config,
        tokenizer=job.files.tokenizer,
    )


@dataclass
class Course:
    """A training under way, for what happens between its updates.

    Attributes:
        step: updates behind the train state.
        num_steps: updates at the end.
    """

    config: SftConfig
    run: Runtime
    job: Job
    signals: StopSignals
    checkpointer: Checkpointer
    collate: Collate
    step: int = 0
    num_steps: int = 0

    def must_stop(self) -> bool:
        """At a point where it is safe, on all ranks: save if a signal asks for it; whether one asks to stop."""
        wish = self.signals.agree(self.run.ranks)
        if wish.save and self.step > 0:
            self.checkpointer.maybe_save(self.step, now=True)
        return wish.stop

    def evaluate_if_due(self) -> float | None:
        """The mean loss on held-out data, if it is time for it and nothing interrupts it."""
        config, extra = self.config, self.job.state.extra
        every = config.eval.every_steps
        is_due = (
            self.step == self.num_steps
            or (config.eval.at_start and self.step == 0)
            or (every is not None and self.step > 0 and self.step % every == 0)
        )
        if not is_due or self.job.data.eval is None or extra["evaluated"] == self.step:
            return None
        loss = measure(self, self.job.data.eval)
        if loss is not None:
            extra["evaluated"] = self.step
            self.job.metrics.say(f"step {self.step}: loss on held-out data {loss:.4f}")
        return loss

    def save_if_due(self, scores: dict[str, float]) -> float:
        """Save if it is time for it; returns how long training was held up, in seconds."""
        began = time.perf_counter()
        is_due = self.config.export.is_due(self.step)
        self.checkpointer.maybe_save(self.step, metrics=scores, now=is_due)
        if self.config.checkpoint.mode == "sync":
            self.checkpointer.wait()
        return time.perf_counter() - began


def run_loop(config: SftConfig, run: Runtime, job: Job) -> int:
    """Train, and export at the end; returns the exit status."""
    exporter = Exporter(job.exports, companions=job.companions, options=config.export.options())
    collate = Collate(job.files.tokenizer.pad_token_id)
    with StopSignals() as signals, open_checkpointer(config, run, job, exporter) as checkpointer:
        course = Course(config, run, job, signals, checkpointer, collate)
        begin(course)
        update_until_done(course)
    job.metrics.say(checkpointer.report())
    if course.step < course.num_steps:
        job.metrics.say(
            f"stopped after step {course.step} of {course.num_steps}; run the same command again to go on"
        )
        return STOPPED
    wait_for_exports(exporter, run.ranks)
    if config.export.at_end:
        path = export_at_end(
            job.model,
            job.exports,
            course.step,
            companions=job.companions,
            config=config.export,
            ranks=run.ranks,
        )
        job.metrics.say(f"exported to {path}")
    return 0


def update_until_done(course: Course) -> None:
    """The loop: update, evaluate, save, log, until there is nothing left or a signal says stop."""
    config, run, job = course.config, course.run, course.job
    model, optimizer, sampler = job.model, job.optimizer, job.sampler
    batches = load_batches(
        job.data.train,
        sampler.micro_batches(job.shape, end=job.end),
        course.collate,
        num_workers=config.data.num_workers,
        pin=run.device.type == "cuda",
    )
    clock = Clock()
    while course.step < course.num_steps and not course.must_stop():
        micro_batches = list(islice(batches, job.shape.num_micro_batches))
        rate = rate_at(course.step + 1, course.num_steps, config.optimizer)
        set_rate(optimizer, rate)
        reseed(config.seed, course.step, run.rank)
        loss = accumulate(course, micro_batches)
        if loss is None:
            break  # the gradients so far are dropped, and this update is done again after the resumption
        grad_norm = clip_gradients(model, config.optimizer.clip_norm).item()
        check_finite(loss, grad_norm, course.step + 1, job.checkpoints)
        optimizer.step()
        optimizer.zero_grad()
        sampler.advance(min(config.batch_size, job.end - sampler.position))
        course.step += 1

        eval_loss = course.evaluate_if_due()
        scores = {"loss": loss} if eval_loss is None else {"loss": loss, "eval_loss": eval_loss}
        checkpoint_s = course.save_if_due(scores)
        clock.count(sum(batch.num_tokens for batch in micro_batches))
        tokens_per_s, step_s = clock.read()
        values: dict[str, object] = {
            **scores,
            "lr": rate,
            "grad_norm": grad_norm,
            "tokens_per_s": tokens_per_s * run.world_size,
            "step_s": step_s,
            "memory_gb": memory_gb(run.device),
            "checkpoint_ms": checkpoint_s * 1e3,
            "epoch": sampler.position / sampler.epoch_size,
        }
        if config.log.samples:
            values["samples"] = gather_samples(micro_batches, run)
        job.metrics.write(course.step, values)


def open_checkpointer(
    config: SftConfig, run: Runtime, job: Job, exporter: Exporter
) -> Checkpointer:
    """The checkpointer of a run; rank 0's starts the exports of what was committed."""
    ours = config.checkpoint
    return Checkpointer(
        job.checkpoints,
        job.state,
        save=SavePolicy(every_steps=ours.every_steps, every_s=ours.every_s),
        keep=RetentionPolicy(
            last=ours.keep_last,
            best=ours.keep_best,
            metric="eval_loss" if ours.keep_best else None,
        ),
        staging=ours.staging,
        bandwidth_bytes_per_s=ours.bandwidth_bytes_per_s,
        on_event=export_when_committed(exporter, config.export, job.checkpoints)
        if run.is_first
        else None,
    )


def begin(course: Course) -> None:
    """Put the train state back, if there is one to go on from, and say what lies ahead.

    Raises:
        BadInput: it does not fit; nothing was trained.
    """
    config, job = course.config, course.job
    try:
        course.step = resume(job, course.checkpointer)
        check_documents(job.model, (job.data.train, job.data.eval), course.run)
    except RankMissing:
        raise
    except BackstayError as error:
        raise BadInput from error
    left = -(-(job.end - job.sampler.position) // config.batch_size)
    course.num_steps = course.step + left
    if config.max_steps is not None:
        course.num_steps = min(course.num_steps, max(config.max_steps, course.step))
    if job.earlier is not None:
        job.metrics.say(
            f"going on after step {course.step} of {course.num_steps}, epoch {job.sampler.epoch + 1}, from {job.earlier.path}"
        )
    if course.step == course.num_steps:
        job.metrics.say("nothing left to train")
    job.metrics.begin(course.step, course.num_steps)
    loss = course.evaluate_if_due()
    if loss is not None:
        job.metrics.write(course.step, {"eval_loss": loss})


def resume(job: Job, checkpointer: Checkpointer) -> int:
    """Put the train state back; returns the number of updates behind it."""
    if job.earlier is None:
        return 0
    now = {name: job.state.extra[name] for name in ("config", "identity")}
    if job.earlier.path == job.checkpoints:
        step = checkpointer.restore()
    else:
        step = restore(job.earlier.path, job.state)
    job.state.extra.update(now)
    return step


def accumulate(course: Course, micro_batches: Iterable[MicroBatch]) -> float | None:
    """Gradients of the mean loss over all targets of all ranks; returns that loss, or None if it had to stop in between."""
    run = course.run
    num_targets = run.ranks.add(sum(batch.num_targets for batch in micro_batches))
    total = torch.zeros((), dtype=torch.float64)
    for number, batch in enumerate(micro_batches):
        if number and course.must_stop():
            return None
        loss = token_loss(course.job.model, batch.to(run.device))
        # FSDP averages over ranks, but the mean is over tokens.
        (loss * (run.world_size / num_targets)).backward()
        total += loss.detach().double().cpu()
    return sum_over_ranks(total, run) / num_targets


@torch.no_grad()
def measure(course: Course, sequences: Sequences) -> float | None:
    """Mean loss over all targets of held-out data; None if it had to stop in between."""
    model, run, size = course.job.model, course.run, course.config.micro_batch_size
    plan = plan_eval(
        len(sequences), BatchShape(size * run.world_size, size, run.rank, run.world_size)
    )
    total, num_targets = torch.zeros((), dtype=torch.float64), 0
    model.eval()
    try:
        for batch in load_batches(sequences, plan, course.collate):
            if course.must_stop():
                return None
            total += token_loss(model, batch.to(run.device)).double().cpu()
            num_targets += batch.num_targets
    finally:
        model.train()
    return sum_over_ranks(total, run) / run.ranks.add(num_targets)


def sum_over_ranks(value: Tensor, run: Runtime) -> float:
    """Sum of a number over all ranks."""
    if run.world_size > 1:
        value = value.to(run.device)
        dist.all_reduce(value)
    return value.item()


def gather_samples(micro_batches: Iterable[MicroBatch], run: Runtime) -> list[int]:
    """The samples of an update over all ranks, in no particular order."""
    mine = [sample for batch in micro_batches for sample in batch.sample_ids if sample >= 0]
    return sorted(sample for found in run.ranks.exchange(mine) for sample in found)


def check_finite(loss: float, grad_norm: float, step: int, checkpoints: Path) -> None:
    """Stop a training that has gone astray before it is saved.

    Raises:
        Diverged: loss or gradients are no numbers any more; on all ranks, as all see the same values.
    """
    if not (abs(loss) < float("inf") and abs(grad_norm) < float("inf")):
        raise Diverged(
            f"step {step}: loss {loss}, gradient norm {grad_norm}; the update was not made. The checkpoints in {checkpoints} are from "
            "before: resume with a lower optimizer.lr or a smaller optimizer.clip_norm"
        )


def main() -> int:
    """Run the recipe from a command line."""
    return run_recipe(SftConfig, train)


if __name__ == "__main__":
    sys.exit(main())
