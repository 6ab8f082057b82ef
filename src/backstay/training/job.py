"""Job: all that a loop works with, built and checked from a configuration; and Method: what one recipe brings to it.

Runs in: all ranks together. Guarantees: whatever is wrong with the input raises here, on all ranks, before anything is trained or changed.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from backstay.fingerprint import fingerprint_frozen
from backstay.state import Collector, TrainState
from backstay.training.batches import Collate, MicroBatch
from backstay.training.config import to_plain
from backstay.training.metrics import Metrics
from backstay.training.model import ModelConfig, ModelFiles
from backstay.training.optim import make_optimizer
from backstay.training.prepare import (
    TokenizedData,
    check_context,
    fill_base,
    prepare_data,
    prepare_files,
    prepare_frozen,
    prepare_model,
    prepare_sampler,
)
from backstay.training.recipe_config import RecipeConfig
from backstay.training.resume import Earlier, check_changes, find_earlier
from backstay.training.runtime import Runtime, be_deterministic, reseed
from backstay.training.sampler import BatchShape, ResumableSampler
from backstay.training.tokens import Kind

log = logging.getLogger("backstay")


@dataclass
class Job:
    """All that the loop works with.

    Attributes:
        config: settings of the recipe.
        end: position of the sampler when everything has been trained on.
        earlier: what the run goes on from.
        helper: a frozen model beside the trained one, in eval mode: a reference, a teacher.
    """

    config: Any
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
    collate: Callable[[list[Any]], MicroBatch]
    checkpoints: Path
    exports: Path
    companions: Path
    helper: nn.Module | None = None


@dataclass(frozen=True)
class Helper:
    """A frozen model beside the trained one.

    Attributes:
        identity: hashes of it, by name: a resumed run must have the same.
    """

    model: nn.Module | None = None
    identity: Mapping[str, str] = field(default_factory=dict)


def no_helper(config: Any, files: ModelFiles, run: Runtime) -> Helper:
    """For methods that need no other model."""
    return Helper()


def freeze_beside(
    name: str, config: RecipeConfig, files: ModelFiles, model_config: ModelConfig, run: Runtime
) -> Helper:
    """Load a frozen model beside the trained one, under a name for messages and for its hash."""
    model = prepare_frozen(files, model_config, parallel=config.parallel, seed=config.seed, run=run)
    fingerprint = fingerprint_frozen(Collector(TrainState(model=model)).collect(), run.ranks)
    log.info("%s: frozen, fingerprint %s", name, fingerprint)
    return Helper(model, {name: fingerprint})


@dataclass(frozen=True)
class Method:
    """What a recipe brings; all else is the same for all recipes.

    Attributes:
        schema: its configuration.
        loop: updates until there is nothing left or a signal says stop. The argument is a `Course`.
        score: sums over a micro-batch by name, of which "loss" is differentiated; what is logged are means.
        kind, collate: of its data.
        make_helper: the frozen model beside the trained one.
    """

    schema: type[RecipeConfig]
    loop: Callable[[Any], None]
    score: Callable[[Job, Any], dict[str, Tensor]]
    kind: Kind = "samples"
    collate: Callable[[int], Callable[[list[Any]], Any]] = Collate
    make_helper: Callable[[Any, ModelFiles, Runtime], Helper] = no_helper


def prepare(method: Method, config: RecipeConfig, run: Runtime) -> Job:
    """Check all that was given, and build what the loop needs.

    Raises:
        BackstayError: on all ranks; nothing was changed.
    """
    out = Path(config.out)
    if config.deterministic:
        be_deterministic()
    files = prepare_files(config.model, config.data.pad_token, out, run)
    run.together(lambda: check_context(files, config.data.seq_len))
    data = prepare_data(config.data, files, out / "tokens", run, kind=method.kind)
    shape = BatchShape(config.batch_size, config.micro_batch_size, run.rank, run.world_size)
    sampler = run.together(
        lambda: prepare_sampler(config.data, data, seed=config.seed, shape=shape)
    )
    assert sampler is not None, "a rank without it has raised"

    helper = method.make_helper(config, files, run)
    identity = {**files.identity(), **helper.identity, "data": sorted(data.names.values())}
    plain = to_plain(config)
    earlier = find_earlier(out / "checkpoints", config.resume, run.ranks)
    if earlier is not None:
        changes = check_changes(method.schema, earlier, plain, identity, allow=config.allow_changes)
        for change in changes:
            log.info("changed since the checkpoint: %s", change)

    reseed(config.seed)
    model = prepare_model(
        files,
        config.model,
        lora=config.lora,
        parallel=config.parallel,
        run=run,
        qat=config.qat,
    )
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
        config=config,
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
        collate=method.collate(files.tokenizer.pad_token_id),
        checkpoints=out / "checkpoints",
        exports=out / "export",
        companions=out / "companions",
        helper=helper.model,
    )
