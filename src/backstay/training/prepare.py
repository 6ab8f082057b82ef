"""From a configuration to the objects of a training, the same for every recipe; all checks of what the user gave are in here.

Runs in: all ranks together; what touches the output directory is done by rank 0. Nothing is trained yet, and nothing that was saved is changed.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from backstay.errors import ConfigError, DataError
from backstay.training.batches import DataConfig, Sequences
from backstay.training.lora import LoraConfig, add_adapters, init_adapters
from backstay.training.losses import check_packing
from backstay.training.model import (
    ModelConfig,
    ModelFiles,
    build_model,
    check_vocabulary,
    load_weights,
    materialize,
    open_model,
    tokenizer_hash,
)
from backstay.training.pairs import Pairs
from backstay.training.parallel import ParallelConfig, check_world, make_mesh, spread
from backstay.training.qat import QatConfig, add_fake_quantization
from backstay.training.runtime import Runtime
from backstay.training.sampler import BatchShape, ResumableSampler
from backstay.training.tokens import Kind, Tokenizing, TokenStore, hash_file, make_store

log = logging.getLogger("backstay")


@dataclass(frozen=True)
class TokenizedData:
    """The data sets of a run.

    Attributes:
        train, eval: sequences, or pairs of them; `eval` is None if there is nothing to evaluate on.
        names: of the token stores, by file: they say what the content is.
    """

    train: Sequences | Pairs
    eval: Sequences | Pairs | None
    names: dict[str, str]


def prepare_files(
    config: ModelConfig, pad_token: str | None, out: Path, run: Runtime
) -> ModelFiles:
    """Open model and tokenizer; a GGUF file is converted once, by rank 0."""
    if config.path is not None and config.path.endswith(".gguf"):
        from backstay.interop.gguf import convert_gguf

        source = Path(config.path)
        name = run.together(lambda: hash_file(source), on_first_only=True)
        converted = out / f"base-{run.ranks.share(name)}"
        run.together(lambda: convert_gguf(source, converted), on_first_only=True)
        config = replace(config, path=str(converted))
    files = run.together(lambda: open_model(config, pad_token=pad_token))
    assert files is not None, "a rank without it has raised"
    return files


def prepare_data(
    config: DataConfig, files: ModelFiles, home: Path, run: Runtime, *, kind: Kind = "samples"
) -> TokenizedData:
    """Tokenize all files, by rank 0 for all, or find it done.

    Args:
        kind: what a line of a file is.

    Raises:
        ConfigError, DataError: on all ranks.
    """
    run.together(lambda: check_data_config(config))
    how = Tokenizing(
        seq_len=config.seq_len,
        too_long=config.too_long,
        use_template=config.use_template,
        kind=kind,
    )
    paths = [Path(file) for file in (*config.train, *config.eval)]

    def tokenize() -> list[Path]:
        digest = tokenizer_hash(files.tokenizer)
        made = []
        for path in paths:
            made.append(
                make_store(path, home, tokenizer=files.tokenizer, tokenizer_hash=digest, how=how)
            )
            counts = TokenStore(made[-1]).counts
            log.info("%s: %s", path, counts)
            check_vocabulary(files, counts.largest_id)
            if not counts.kept:
                raise DataError(
                    f"{path}: nothing to train on: {counts.dropped} samples, none of them with a token to learn within {config.seq_len} tokens"
                )
        return made

    made = run.ranks.share(run.together(tokenize, on_first_only=True))
    assert made is not None, "rank 0 has made them"
    stores = run.together(lambda: [TokenStore(path) for path in made])
    assert stores is not None, "a rank without them has raised"

    def arrange(stores: list[TokenStore]) -> Sequences | Pairs:
        if kind == "pairs":
            return Pairs(stores)
        return Sequences(stores, capacity=config.seq_len if config.packing else None)

    num_train = len(config.train)
    held_out = stores[num_train:]
    return TokenizedData(
        train=arrange(stores[:num_train]),
        eval=arrange(held_out) if held_out else None,
        names={str(path): store.name for path, store in zip(paths, stores, strict=True)},
    )


def check_data_config(config: DataConfig) -> None:
    """See that the values go together."""
    if not config.train:
        raise ConfigError("data.train: expected one or more JSONL files")
    if config.weights and len(config.weights) != len(config.train):
        raise ConfigError(
            f"data.weights: expected one per file of data.train ({len(config.train)}), found {len(config.weights)}"
        )
    if not all(0 < weight < math.inf for weight in config.weights):
        raise ConfigError(f"data.weights={list(config.weights)}: expected numbers > 0")
    if config.seq_len < 2:
        raise ConfigError(f"data.seq_len={config.seq_len}: expected a number >= 2")
    if config.num_workers < 0:
        raise ConfigError(f"data.num_workers={config.num_workers}: expected a number >= 0")


def prepare_sampler(
    config: DataConfig, data: TokenizedData, *, seed: int, shape: BatchShape
) -> ResumableSampler:
    """The order of the training data.

    Raises:
        ConfigError, DataError: the batch does not fit ranks or data.
    """
    per_pass = shape.micro_batch_size * shape.world_size
    if shape.micro_batch_size < 1 or shape.batch_size < 1 or shape.batch_size % per_pass:
        raise ConfigError(
            f"batch_size={shape.batch_size}: expected a multiple of micro_batch_size x ranks = {shape.micro_batch_size} x {shape.world_size}, "
            "because each rank takes micro-batches of that size from each batch"
        )
    sampler = ResumableSampler(
        data.train.sizes, weights=config.weights, seed=seed, shuffle=config.shuffle
    )
    if shape.batch_size > sampler.epoch_size:
        what = "packed sequences" if config.packing else "samples"
        raise DataError(
            f"batch_size={shape.batch_size} is larger than the data: an epoch has {sampler.epoch_size} {what}; lower batch_size, or use more data"
        )
    return sampler


def check_context(files: ModelFiles, seq_len: int) -> None:
    """See that the model can take sequences of that length."""
    longest = getattr(files.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and seq_len > longest:
        raise ConfigError(
            f"data.seq_len={seq_len}: the model's context is {longest} tokens (max_position_embeddings); lower data.seq_len"
        )


def prepare_model(
    files: ModelFiles,
    config: ModelConfig,
    *,
    lora: LoraConfig,
    parallel: ParallelConfig,
    run: Runtime,
    qat: QatConfig = QatConfig(),  # noqa: B008  (frozen)
) -> nn.Module:
    """Build and shard a model, with adapters if wanted, its values still arbitrary."""
    run.together(lambda: check_world(parallel, run.world_size))
    model = run.together(lambda: build_model(files, config))
    assert model is not None, "a rank without it has raised"
    if qat.is_on:  # before adapters, which compute in full precision
        run.together(lambda: add_fake_quantization(model, qat))
    if lora.is_on:
        run.together(lambda: add_adapters(model, lora))
    spread(model, parallel, make_mesh(parallel, run.device, run.world_size))
    materialize(model, run.device)
    return model


def fill_base(model: nn.Module, files: ModelFiles, *, seed: int, run: Runtime) -> None:
    """Give the model the values it starts from."""
    origin = run.together(lambda: load_weights(model, files, seed=seed))
    init_adapters(model, seed)
    log.info("model: %s", origin)


def prepare_frozen(
    files: ModelFiles, config: ModelConfig, *, parallel: ParallelConfig, seed: int, run: Runtime
) -> nn.Module:
    """A model beside the trained one: sharded like it, in eval mode, never trained, in no checkpoint.

    Args:
        seed: of random weights.
    """
    model = prepare_model(files, config, lora=LoraConfig(), parallel=parallel, run=run)
    fill_base(model, files, seed=seed, run=run)
    return model.requires_grad_(False).eval()


def check_documents(
    model: nn.Module, packed: Sequence[Sequences | Pairs | None], run: Runtime
) -> None:
    """If any sequence holds several documents, see that the model keeps them apart."""
    packs = (
        pack
        for each in packed
        if isinstance(each, Sequences)
        for store in each.members
        for pack in store
    )
    if any(len(pack) > 1 for pack in packs):
        check_packing(model, run.device)
