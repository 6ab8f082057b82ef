"""Course: a training under way: the parts of an update, and what happens between updates: signals, evaluation, saves, metrics.

Runs in: the training thread of all ranks. Guarantees: whoever stops it, and whenever, all ranks leave the loop at the same point, and what they save there
is the state after a whole number of updates. A step is logged before it is saved: no step that a checkpoint holds is missing from the metrics.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from backstay.checkpointer import Checkpointer
from backstay.errors import Diverged
from backstay.training.batches import MicroBatch, load_batches, plan_eval
from backstay.training.job import Job, Method
from backstay.training.metrics import Clock, memory_gb
from backstay.training.optim import clip_gradients, rate_at, set_rate
from backstay.training.qat import set_fake_quantization
from backstay.training.recipe_config import RecipeConfig
from backstay.training.runtime import Runtime, reseed
from backstay.training.sampler import BatchShape
from backstay.training.signals import StopSignals


@dataclass
class Course:
    """A training under way.

    Attributes:
        step: updates behind the train state.
        num_steps: updates at the end.
        batches: this rank's micro-batches, from the sampler's position on.
        saving_s: how long saves have held up training since the last line of metrics.
    """

    method: Method
    config: RecipeConfig
    run: Runtime
    job: Job
    signals: StopSignals
    checkpointer: Checkpointer
    step: int = 0
    num_steps: int = 0
    batches: Iterator[MicroBatch] = field(default_factory=lambda: iter(()))
    clock: Clock = field(default_factory=Clock)
    saving_s: float = 0.0

    def must_stop(self) -> bool:
        """At a point where it is safe, on all ranks: save if a signal asks for it; whether one asks to stop."""
        wish = self.signals.agree(self.run.ranks)
        if wish.save and self.step > 0:
            self.checkpointer.maybe_save(self.step, now=True)
        return wish.stop

    def next_batches(self) -> list[MicroBatch] | None:
        """This rank's micro-batches of the next update, whose learning rate and random numbers are set; None if there is none, or a signal says stop."""
        if self.step >= self.num_steps or self.must_stop():
            return None
        micro_batches = list(islice(self.batches, self.job.shape.num_micro_batches))
        rate = rate_at(self.step + 1, self.num_steps, self.config.optimizer)
        set_rate(self.job.optimizer, rate)
        self.quantize_if_due()
        reseed(self.config.seed, self.step, self.run.rank)
        return micro_batches

    def accumulate(self, micro_batches: Iterable[MicroBatch]) -> dict[str, float] | None:
        """Gradients of the mean loss over all targets of all ranks; returns the means, or None if it had to stop in between."""
        run = self.run
        num_targets = run.ranks.add(sum(batch.num_targets for batch in micro_batches))
        totals = Totals()
        for number, batch in enumerate(micro_batches):
            if number and self.must_stop():
                return None  # the gradients so far are dropped, and this update is done again after the resumption
            sums = self.method.score(self.job, batch.to(run.device))
            # FSDP averages over ranks, but the mean is over targets.
            (sums["loss"] * (run.world_size / num_targets)).backward()
            totals.add(sums)
        return totals.means(num_targets, run)

    def update(self, loss: float) -> float:
        """Let the optimizer take its step; returns the norm of the gradients.

        Raises:
            Diverged: loss or gradients are no numbers any more; nothing was updated.
        """
        job, config = self.job, self.config
        grad_norm = clip_gradients(job.model, config.optimizer.clip_norm).item()
        check_finite(loss, grad_norm, self.step + 1, job.checkpoints)
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.sampler.advance(min(config.batch_size, job.end - job.sampler.position))
        self.step += 1
        return grad_norm

    def quantize_if_due(self) -> None:
        """Let the model compute quantised, or not yet, as its step has it."""
        if self.config.qat.is_on:
            set_fake_quantization(self.job.model, self.config.qat.is_active(self.step))

    def evaluate_if_due(self) -> dict[str, float]:
        """Means on held-out data, their names beginning with `eval_`, if it is time for it and nothing interrupts it."""
        config, extra = self.config, self.job.state.extra
        every = config.eval.every_steps
        is_due = (
            self.step == self.num_steps
            or (config.eval.at_start and self.step == 0)
            or (every is not None and self.step > 0 and self.step % every == 0)
        )
        if not is_due or self.job.data.eval is None or extra["evaluated"] == self.step:
            return {}
        self.quantize_if_due()
        means = self._measure()
        if means is None:
            return {}
        extra["evaluated"] = self.step
        others = "".join(f", {name} {value:.4g}" for name, value in means.items() if name != "loss")
        self.job.metrics.say(f"step {self.step}: loss on held-out data {means['loss']:.4f}{others}")
        return {f"eval_{name}": value for name, value in means.items()}

    @torch.no_grad()
    def _measure(self) -> dict[str, float] | None:
        """Means over all targets of held-out data; None if it had to stop in between."""
        job, run, size = self.job, self.run, self.config.micro_batch_size
        assert job.data.eval is not None, "there is something to evaluate on"
        shape = BatchShape(size * run.world_size, size, run.rank, run.world_size)
        totals, num_targets = Totals(), 0
        job.model.eval()
        try:
            plan = plan_eval(len(job.data.eval), shape)
            for batch in load_batches(job.data.eval, plan, job.collate):
                if self.must_stop():
                    return None
                totals.add(self.method.score(job, batch.to(run.device)))
                num_targets += batch.num_targets
        finally:
            job.model.train()
        return totals.means(run.ranks.add(num_targets), run)

    def log(
        self, micro_batches: Iterable[MicroBatch], scores: dict[str, float], grad_norm: float
    ) -> None:
        """Write down how the last update went."""
        run, sampler = self.run, self.job.sampler
        self.clock.count(sum(batch.num_tokens for batch in micro_batches))
        tokens_per_s, step_s = self.clock.read()
        values: dict[str, object] = {
            **scores,
            "lr": self.job.optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "tokens_per_s": tokens_per_s * run.world_size,
            "step_s": step_s,
            "memory_gb": memory_gb(run.device),
            "checkpoint_ms": self.saving_s * 1e3,
            "epoch": sampler.position / sampler.epoch_size,
        }
        if self.config.log.samples:
            values["samples"] = gather_samples(micro_batches, run)
        self.job.metrics.write(self.step, values)
        self.saving_s = 0.0

    def save_if_due(self, scores: dict[str, float]) -> None:
        """Save if it is time for it."""
        began = time.perf_counter()
        is_due = self.config.export.is_due(self.step)
        self.checkpointer.maybe_save(self.step, metrics=scores, now=is_due)
        if self.config.checkpoint.mode == "sync":
            self.checkpointer.wait()
        self.saving_s += time.perf_counter() - began


class Totals:
    """Sums by name over micro-batches, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, sums: dict[str, Tensor]) -> None:
        """Add those of one more micro-batch."""
        for name, value in sums.items():
            so_far = self._sums.get(name, torch.zeros((), dtype=torch.float64))
            self._sums[name] = so_far + value.detach().double().cpu()

    def means(self, num_targets: int, run: Runtime) -> dict[str, float]:
        """Over all targets of all ranks."""
        values = torch.stack([*self._sums.values()])
        if run.world_size > 1:
            values = values.to(run.device)
            dist.all_reduce(values)
        return {
            name: value / num_targets
            for name, value in zip(self._sums, values.tolist(), strict=True)
        }


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
