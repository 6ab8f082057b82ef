"""Supervised fine-tuning: any Hugging Face causal LM on chats, or on prompts with completions.

    backstay train sft --nproc 2 model.path=DIR data.train=chats.jsonl out=runs/first
    torchrun --nproc-per-node 8 -m backstay.recipes.sft --config my.yaml optimizer.lr=1e-5

The same command again goes on from the newest checkpoint. Weights, optimizer, data position and random numbers come back bit for bit, so the
result is that of a run that was never interrupted.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
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
from backstay.training.exports import ExportConfig, export_at_end, export_when_committed
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
        evaluated: the last step whose evaluation came to its end; part of the state.
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
    sampler = run.together(lambda: prepare_sampler(config.data, data, seed=config.seed, shape=shape))
    assert sampler is not None, "a rank without it has raised"

    identity = {**files.identity(), "data": sorted(data.names.values())}
    plain = to_plain(config)
    earlier = find_earlier(out / "checkpoints", config.resume)
    if earlier is not None:
        changes = check_changes(
            SftConfig, earlier, plain, identity, allow=config.allow_changes
        )
        for change in changes:
            log.info("changed since the checkpoint: %s", change)

    reseed(config.seed)
    model = prepare_model(files, config.model, config.parallel, run)
    if earlier is None:
        fill_base(model, files, seed=config.seed, run=run)
    optimizer = make_optimizer(model, config.optimizer)
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


def resume(config: SftConfig, run: Runtime, job: Job, checkpointer: Checkpointer) -> int:
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


def run_loop(config: SftConfig, run: Runtime, job: Job) -> int:
    """The training itself."""
    model, optimizer, sampler, metrics = job.model, job.optimizer, job.sampler, job.metrics
    exports = Path(config.out) / "export"
    exporter = Exporter(exports, companions=job.companions, options=config.export.options())
    checkpointer = Checkpointer(
        job.checkpoints,
        job.state,
        save=SavePolicy(
            every_steps=config.checkpoint.every_steps, every_s=config.checkpoint.every_s
        ),
        keep=RetentionPolicy(
            last=config.checkpoint.keep_last,
            best=config.checkpoint.keep_best,
            metric="eval_loss" if config.checkpoint.keep_best else None,
        ),
        staging=config.checkpoint.staging,
        bandwidth_bytes_per_s=config.checkpoint.bandwidth_bytes_per_s,
        on_event=export_when_committed(exporter, config.export, job.checkpoints)
        if run.is_first
        else None,
    )
    collate = Collate(job.files.tokenizer.pad_token_id)
    with StopSignals() as signals, checkpointer:
        try:
            step = resume(config, run, job, checkpointer)
            check_documents(model, (job.data.train, job.data.eval), run)
        except RankMissing:
            raise
        except BackstayError as error:
            raise BadInput from error

        def heed() -> bool:
            """At a point where it is safe: save if that is wanted; whether to stop."""
            wish = signals.agree(run.ranks)
            if wish.save and step > 0:
                checkpointer.maybe_save(step, now=True)
            return wish.stop

        def evaluate() -> float | None:
            loss = measure(model, job.data.eval, collate, config, run, heed)
            if loss is not None:
                job.state.extra["evaluated"] = step
                metrics.say(f"step {step}: loss on held-out data {loss:.4f}")
            return loss

        left = -(-(job.end - sampler.position) // config.batch_size)
        num_steps = step + left
        if config.max_steps is not None:
            num_steps = min(num_steps, max(config.max_steps, step))
        if step:
            metrics.say(f"going on after step {step} of {num_steps}, epoch {sampler.epoch + 1}, from {job.earlier.path}")
        if step == num_steps:
            metrics.say("nothing left to train")
        metrics.begin(step, num_steps)

        def is_eval_due() -> bool:
            every = config.eval.every_steps
            at = step == num_steps or (config.eval.at_start and step == 0)
            is_due = at or (every is not None and step > 0 and step % every == 0)
            return is_due and job.data.eval is not None and job.state.extra["evaluated"] != step

        eval_loss = None
        if is_eval_due():
            eval_loss = evaluate()
            if eval_loss is not None:
                metrics.write(step, {"eval_loss": eval_loss})

        batches = load_batches(
            job.data.train,
            sampler.micro_batches(job.shape, end=job.end),
            collate,
            num_workers=config.data.num_workers,
            pin=run.device.type == "cuda",
        )
        clock = Clock()
        while step < num_steps and not heed():
            micro_batches = list(islice(batches, job.shape.num_micro_batches))
            num_targets = run.ranks.add(sum(batch.num_targets for batch in micro_batches))
            rate = rate_at(step + 1, num_steps, config.optimizer)
            set_rate(optimizer, rate)
            reseed(config.seed, step, run.rank)
            loss = accumulate(model, micro_batches, num_targets, run, heed)
            if loss is None:
                break  # the gradients so far are dropped, and this update is done again after the resumption
            grad_norm = clip_gradients(model, config.optimizer.clip_norm).item()
            check_finite(loss, grad_norm, step + 1, job.checkpoints)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            sampler.advance(min(config.batch_size, job.end - sampler.position))
            clock.count(sum(batch.num_tokens for batch in micro_batches))

            eval_loss = evaluate() if is_eval_due() else None
            began = time.perf_counter()
            scores = {"loss": loss} if eval_loss is None else {"loss": loss, "eval_loss": eval_loss}
            checkpointer.maybe_save(step, metrics=scores, now=config.export.is_due(step))
            if config.checkpoint.mode == "sync":
                checkpointer.wait()
            checkpoint_s = time.perf_counter() - began
            tokens_per_s, step_s = clock.read()
            values = {
                "loss": loss,
                "eval_loss": eval_loss,
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
            metrics.write(step, values)
        is_done = step == num_steps
    if run.is_first and checkpointer.events:
        metrics.say(checkpointer.report())
    if not is_done:
        metrics.say(f"stopped after step {step} of {num_steps}; run the same command again to go on")
        return STOPPED
    if config.export.at_end:
        path = export_at_end(
            model, exports, step, companions=job.companions, config=config.export, ranks=run.ranks
        )
        metrics.say(f"exported to {path}")
    run.together(exporter.wait, on_first_only=True)
    return 0


def accumulate(
    model: nn.Module,
    micro_batches: Iterable[MicroBatch],
    num_targets: int,
    run: Runtime,
    heed: Callable[[], bool],
) -> float | None:
    """Gradients of the mean loss over all targets of all ranks; returns that loss, or None if it had to stop in between."""
    total = torch.zeros((), dtype=torch.float64)
    for number, batch in enumerate(micro_batches):
        if number and heed():
            return None
        loss = token_loss(model, batch.to(run.device))
        # FSDP averages over ranks, but the mean is over tokens.
        (loss * (run.world_size / num_targets)).backward()
        total += loss.detach().double().cpu()
    return sum_over_ranks(total, run) / num_targets


@torch.no_grad()
def measure(
    model: nn.Module,
    sequences: Sequences | None,
    collate: Collate,
    config: SftConfig,
    run: Runtime,
    heed: Callable[[], bool],
) -> float | None:
    """Mean loss over all targets of held-out data; None if it had to stop in between, or there is none."""
    if sequences is None:
        return None
    shape = BatchShape(
        config.micro_batch_size * run.world_size, config.micro_batch_size, run.rank, run.world_size
    )
    total, num_targets = torch.zeros((), dtype=torch.float64), 0
    model.eval()
    try:
        for batch in load_batches(sequences, plan_eval(len(sequences), shape), collate):
            if heed():
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
