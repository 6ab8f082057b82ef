"""Course: a training under way, and what happens between its updates: signals, evaluation, saves; its beginning and its end.

Runs in: the training thread of all ranks. Guarantees: whoever stops it, and whenever, all ranks leave the loop at the same point, and what they save there
is the state after a whole number of updates.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from backstay.attempts import step_dir_name
from backstay.checkpointer import Checkpointer
from backstay.errors import BackstayError, Diverged, RankMissing
from backstay.interop.hf import Exporter, save_companions
from backstay.load.restore import restore
from backstay.policies import RetentionPolicy, SavePolicy
from backstay.state import TrainState
from backstay.training.batches import Collate, Sequences
from backstay.training.config import to_yaml
from backstay.training.exports import export_at_end, export_when_committed, wait_for_exports
from backstay.training.lora import collect_adapter, write_adapter
from backstay.training.metrics import Metrics
from backstay.training.model import ModelFiles
from backstay.training.prepare import TokenizedData, check_documents
from backstay.training.recipe_config import RecipeConfig
from backstay.training.resume import Earlier
from backstay.training.runtime import BadInput, Runtime
from backstay.training.sampler import BatchShape, ResumableSampler
from backstay.training.signals import STOPPED, StopSignals


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


@dataclass
class Course:
    """A training under way, for what happens between its updates.

    Attributes:
        step: updates behind the train state.
        num_steps: updates at the end.
    """

    config: RecipeConfig
    run: Runtime
    job: Job
    signals: StopSignals
    checkpointer: Checkpointer
    collate: Collate
    measure: Callable[["Course", Sequences], float | None]
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
        loss = self.measure(self, self.job.data.eval)
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


def run_course(
    config: RecipeConfig,
    run: Runtime,
    job: Job,
    *,
    loop: Callable[[Course], None],
    measure: Callable[[Course, Sequences], float | None],
) -> int:
    """Train, and export at the end; returns the exit status.

    Args:
        loop: updates until `course.step` is `course.num_steps`, or `course.must_stop()`.
        measure: the loss on held-out data; None if `course.must_stop()`.
    """
    exporter = Exporter(job.exports, companions=job.companions, options=config.export.options())
    collate = Collate(job.files.tokenizer.pad_token_id)
    with StopSignals() as signals, open_checkpointer(config, run, job, exporter) as checkpointer:
        course = Course(config, run, job, signals, checkpointer, collate, measure)
        begin(course)
        loop(course)
    job.metrics.say(checkpointer.report())
    if course.step < course.num_steps:
        job.metrics.say(
            f"stopped after step {course.step} of {course.num_steps}; run the same command again to go on"
        )
        return STOPPED
    wait_for_exports(exporter, run.ranks)
    if config.export.at_end:
        job.metrics.say(f"exported to {export(course)}")
    return 0


def export(course: Course) -> Path:
    """Write what was trained for others: the whole model, or its adapters."""
    config, job, ranks = course.config, course.job, course.run.ranks
    if not config.lora.is_on:
        return export_at_end(
            job.model,
            job.exports,
            course.step,
            companions=job.companions,
            config=config.export,
            ranks=ranks,
        )
    path = job.exports / step_dir_name(course.step) / "adapter"
    if not ranks.announce(int(path.exists())):
        values = collect_adapter(job.model)
        base = str(job.files.weights or "")
        course.run.together(
            lambda: write_adapter(path, values, config.lora, base), on_first_only=True
        )
    return path


def open_checkpointer(
    config: RecipeConfig, run: Runtime, job: Job, exporter: Exporter
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
        trainable_only=config.lora.is_on,
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
    job.sampler.accepts_other_orders = config.allow_changes
    try:
        course.step = resume(job, course.checkpointer)
        check_documents(job.model, (job.data.train, job.data.eval), course.run)
        course.run.together(lambda: write_companions(config, job), on_first_only=True)
    except RankMissing:
        raise
    except BackstayError as error:
        raise BadInput from error
    left = max(0, -(-(job.end - job.sampler.position) // config.batch_size))
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


def write_companions(config: RecipeConfig, job: Job) -> None:
    """Put down what belongs to the run beside its checkpoints: the configuration, and what every export needs."""
    (Path(config.out) / "config.yaml").write_text(to_yaml(config))
    save_companions(
        job.companions,
        config=job.files.config,
        generation_config=job.files.generation_config,
        tokenizer=job.files.tokenizer,
    )


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
