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

from backstay.state import TrainState
from backstay.training.batches import Collate, MicroBatch
from backstay.training.config import to_plain
from backstay.training.metrics import Metrics
from backstay.training.model import ModelFiles
from backstay.training.optim import make_optimizer
from backstay.training.prepare import (
    TokenizedData,
    check_context,
    fill_base,
    prepare_data,
    prepare_files,
    prepare_model,
    prepare_sampler,
)
from backstay.training.recipe_config import RecipeConfig
from backstay.training.resume import Earlier, check_changes, find_earlier
from backstay.training.runtime import Runtime, be_deterministic, reseed
from backstay.training.sampler import BatchShape, ResumableSampler

log = logging.getLogger("backstay")


@dataclass
class Job:
    """All that the loop works with.

    Attributes:
        end: position of the sampler when everything has been trained on.
        earlier: what the run goes on from.
        helper: a frozen model beside the trained one, in eval mode: a reference, a teacher.
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
    collate: Callable[[list[Any]], MicroBatch]
    checkpoints: Path
    exports: Path
    companions: Path
    helper: nn.Module | None = None


@dataclass(frozen=True)
class Helper:
    """A frozen model beside the trained one.

    Attributes:
        identity: of it, by name: a resumed run must have the same.
        build: makes it; called once the trained model is there.
    """

    identity: Mapping[str, str] = field(default_factory=dict)
    build: Callable[[], nn.Module | None] = lambda: None


def no_helper(config: Any, files: ModelFiles, run: Runtime) -> Helper:
    """For methods that need no other model."""
    return Helper()


@dataclass(frozen=True)
class Method:
    """What a recipe brings; all else is the same for all recipes.

    Attributes:
        schema: its configuration.
        loop: updates until there is nothing left or a signal says stop. The argument is a `Course`.
        score: sums over a micro-batch by name, of which "loss" is differentiated; what is logged are means. Takes the job too.
        prepare_data, collate: its kind of data.
        find_helper: checks the frozen model beside the trained one.
    """

    schema: type[RecipeConfig]
    loop: Callable[[Any], None]
    score: Callable[[Job, Any], dict[str, Tensor]]
    prepare_data: Callable[..., TokenizedData] = prepare_data
    collate: Callable[[int], Callable[[list[Any]], Any]] = Collate
    find_helper: Callable[[Any, ModelFiles, Runtime], Helper] = no_helper


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
    helper = method.find_helper(config, files, run)
    data = method.prepare_data(config.data, files, out / "tokens", run)
    shape = BatchShape(config.batch_size, config.micro_batch_size, run.rank, run.world_size)
    sampler = run.together(
        lambda: prepare_sampler(config.data, data, seed=config.seed, shape=shape)
    )
    assert sampler is not None, "a rank without it has raised"

    identity = {**files.identity(), **helper.identity, "data": sorted(data.names.values())}
    plain = to_plain(config)
    earlier = find_earlier(out / "checkpoints", config.resume, run.ranks)
    if earlier is not None:
        changes = check_changes(method.schema, earlier, plain, identity, allow=config.allow_changes)
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
        collate=method.collate(files.tokenizer.pad_token_id),
        checkpoints=out / "checkpoints",
        exports=out / "export",
        companions=out / "companions",
        helper=helper.build(),
    )
