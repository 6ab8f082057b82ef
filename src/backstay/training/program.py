"""A recipe's program: from its configuration to a trained and exported model; the loop itself is the recipe's.

Runs in: the main thread of all ranks. Guarantees: what is wrong with the input is a BadInput before anything is trained.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from backstay.attempts import step_dir_name
from backstay.checkpointer import Checkpointer
from backstay.errors import BackstayError, RankMissing
from backstay.interop.hf import Exporter, save_companions
from backstay.load.restore import restore
from backstay.policies import RetentionPolicy, SavePolicy
from backstay.training.batches import load_batches
from backstay.training.config import to_yaml
from backstay.training.course import Course
from backstay.training.exports import (
    export_at_end,
    export_quantized,
    export_when_committed,
    wait_for_exports,
)
from backstay.training.job import Job, Method, prepare
from backstay.training.lora import LoraConfig, adapter_folder, collect_adapter, write_adapter
from backstay.training.merge import merge_into
from backstay.training.metrics import Clock
from backstay.training.prepare import check_documents, prepare_model
from backstay.training.recipe_config import RecipeConfig
from backstay.training.runtime import BadInput, Runtime, run_recipe, take_directory
from backstay.training.signals import STOPPED, StopSignals


def run_method(method: Method, argv: Sequence[str] | None = None) -> int:
    """The main function of a recipe; returns the exit status.

    Args:
        argv: command line without the program's name.
    """
    return run_recipe(method.schema, partial(train, method), argv)


def train(method: Method, config: RecipeConfig, run: Runtime) -> int:
    """Train to the end, or until SIGTERM; returns the exit status."""
    out = Path(config.out)
    try:
        lock = run.together(lambda: take_directory(out), on_first_only=True)
        job = prepare(method, config, run)
    except RankMissing:
        raise  # it died, whatever its input
    except BackstayError as error:
        raise BadInput from error
    try:
        return run_course(method, config, run, job)
    finally:
        job.metrics.close()
        if lock is not None:
            lock.close()


def run_course(method: Method, config: RecipeConfig, run: Runtime, job: Job) -> int:
    """Train, and export at the end; returns the exit status."""
    exporter = Exporter(job.exports, companions=job.companions, options=config.export.options())
    with StopSignals() as signals, open_checkpointer(config, run, job, exporter) as checkpointer:
        course = Course(method, config, run, job, signals, checkpointer)
        begin(course)
        method.loop(course)
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
        assembled=adapter_folder(job.model, config.lora, str(job.files.weights or ""))
        if config.lora.is_on
        else None,
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
    config, run, job = course.config, course.run, course.job
    job.sampler.accepts_other_orders = config.allow_changes
    try:
        course.step = resume(job, course.checkpointer)
        check_documents(job.model, (job.data.train, job.data.eval), run)
        run.together(lambda: write_companions(config, job), on_first_only=True)
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
    if scores := course.evaluate_if_due():
        job.metrics.write(course.step, scores)
    course.batches = load_batches(
        job.data.train,
        job.sampler.micro_batches(job.shape, end=job.end),
        job.collate,
        num_workers=config.data.num_workers,
        pin=run.device.type == "cuda",
    )
    course.clock = Clock()


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


def export(course: Course) -> Path:
    """Write what was trained for others: the whole model, or its adapters, and if wanted the two merged."""
    config, job, run = course.config, course.job, course.run
    home = job.exports
    if not config.lora.is_on:
        return export_whole(course, job.model, home)
    path = home / step_dir_name(course.step) / "adapter"
    if not run.ranks.announce(int(path.exists())):
        values = collect_adapter(job.model)
        base = str(job.files.weights or "")
        run.together(lambda: write_adapter(path, values, config.lora, base), on_first_only=True)
    if config.export.merged:
        plain = prepare_model(
            job.files, config.model, lora=LoraConfig(), parallel=config.parallel, run=run
        )
        run.together(lambda: merge_into(plain, job.model))
        job.metrics.say(f"merged as {export_whole(course, plain, home / 'merged')}")
    return path


def export_whole(course: Course, model: nn.Module, home: Path) -> Path:
    """Write a whole model below a directory; trained for quantisation, quantised as well."""
    config, companions = course.config, course.job.companions
    path = export_at_end(
        model,
        home,
        course.step,
        companions=companions,
        config=config.export,
        ranks=course.run.ranks,
    )
    out = home / "quantized" / path.name
    if config.qat.is_on and not course.run.ranks.announce(int(out.exists())):
        course.run.together(
            lambda: export_quantized(path, out, qat=config.qat, companions=companions),
            on_first_only=True,
        )
    return path
