"""Supervised fine-tuning: any Hugging Face causal LM on chats, or on prompts with completions.

    backstay train sft --nproc 2 model.path=DIR data.train=chats.jsonl out=runs/first
    torchrun --nproc-per-node 8 -m backstay.recipes.sft --config my.yaml optimizer.lr=1e-5

The same command again goes on from the newest checkpoint. Weights, optimizer, data position and random numbers come back bit for bit, so the
result is that of a run that was never interrupted.
"""

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from backstay.errors import BackstayError, RankMissing
from backstay.state import TrainState
from backstay.training.batches import (
    MicroBatch,
    Sequences,
    load_batches,
    plan_eval,
)
from backstay.training.config import to_plain
from backstay.training.course import Course, Job, check_finite, run_course
from backstay.training.losses import token_loss
from backstay.training.metrics import Clock, Metrics, memory_gb
from backstay.training.optim import (
    clip_gradients,
    make_optimizer,
    rate_at,
    set_rate,
)
from backstay.training.prepare import (
    check_context,
    fill_base,
    prepare_data,
    prepare_files,
    prepare_model,
    prepare_sampler,
)
from backstay.training.recipe_config import RecipeConfig
from backstay.training.resume import check_changes, find_earlier
from backstay.training.runtime import (
    BadInput,
    Runtime,
    be_deterministic,
    reseed,
    run_recipe,
    take_directory,
)
from backstay.training.sampler import BatchShape

log = logging.getLogger("backstay")


@dataclass(frozen=True, kw_only=True)
class SftConfig(RecipeConfig):
    """Supervised fine-tuning of a causal LM."""


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
        return run_course(config, run, job, loop=update_until_done, measure=measure)
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
    model = prepare_model(files, config.model, lora=config.lora, parallel=config.parallel, run=run)
    if earlier is None or config.lora.is_on:  # checkpoints of adapters go with their base
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
    return Job(
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


def main() -> int:
    """Run the recipe from a command line."""
    return run_recipe(SftConfig, train)


if __name__ == "__main__":
    sys.exit(main())
