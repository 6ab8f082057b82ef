"""Models and tokenizers from disk: any Hugging Face causal LM, built on the meta device, sharded, then loaded shard by shard.

Guarantees: each rank reads only its own part of each tensor; nothing is unpickled; every parameter gets a value, or an error names it.
"""

import contextlib
import copy
import io
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import xxhash
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from backstay.errors import ConfigError, ModelError
from backstay.naming import canonical_names
from backstay.training.lora import base_name, is_adapter

log = logging.getLogger("backstay")
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
Slices = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model to start from."""

    # a Hugging Face directory, or a GGUF file
    path: str | None = None
    # instead of weights: an architecture, such as {model_type: llama, hidden_size: 64, ...}, with random ones
    config: dict[str, Any] = field(default_factory=dict)
    # where the tokenizer is, if not in `path`
    tokenizer: str | None = None
    # of the weights that the optimizer updates
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"


@dataclass(frozen=True)
class ModelFiles:
    """What a model is made from.

    Attributes:
        weights: directory with safetensors; None for random ones.
        config: the architecture, as transformers has it.
        generation_config: how to generate, if the directory says so.
    """

    weights: Path | None
    config: Any
    tokenizer: Any
    generation_config: Any

    def identity(self) -> dict[str, str]:
        """Hashes of what must not change between a save and its resumption."""
        architecture = {
            name: value
            for name, value in self.config.to_dict().items()
            if name not in ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
        }
        return {
            "model": hash_text(json.dumps(architecture, sort_keys=True, default=str)),
            "tokenizer": tokenizer_hash(self.tokenizer),
        }


def hash_text(text: str) -> str:
    """A short name for a text."""
    return xxhash.xxh3_64_hexdigest(text.encode())


def tokenizer_hash(tokenizer: Any) -> str:
    """Of everything that decides which ids a text gets."""
    return hash_text(tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template))


def open_model(config: ModelConfig, *, pad_token: str | None = None) -> ModelFiles:
    """Look at a model without loading weights.

    Raises:
        ConfigError, ModelError: something is missing or does not go together.
    """
    if (config.path is None) == (not config.config):
        raise ConfigError(
            "model: expected either model.path (a directory, or a GGUF file) or model.config (an architecture for random weights)"
        )
    home = None if config.path is None else check_directory(Path(config.path))
    tokenizer_home = Path(config.tokenizer) if config.tokenizer else home
    if tokenizer_home is None:
        raise ConfigError(
            "model.tokenizer: random weights come without one; name a directory that has one"
        )
    files = ModelFiles(
        weights=home,
        config=read_config(home, config.config),
        tokenizer=read_tokenizer(tokenizer_home, pad_token),
        generation_config=read_generation_config(home),
    )
    if home is not None:
        find_weights(home)
    return files


def check_directory(path: Path) -> Path:
    """See that a model directory has what it needs."""
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise ModelError(
            f"{path}: expected a Hugging Face model directory, or a .gguf file; found {found}"
        )
    if not (path / "config.json").exists():
        raise ModelError(
            f"{path}: config.json is missing, so it is no Hugging Face model directory"
        )
    return path


def read_config(home: Path | None, given: Mapping[str, Any]) -> Any:
    """The architecture."""
    try:
        if home is not None:
            return AutoConfig.from_pretrained(home)
        rest = dict(given)
        model_type = rest.pop("model_type", None)
        if model_type is None:
            raise ConfigError("model.config.model_type is missing, for example llama")
        return AutoConfig.for_model(model_type, **rest)
    except (ValueError, KeyError, OSError, TypeError, StrictDataclassError) as error:
        if isinstance(error, ConfigError):
            raise
        where = "model.config" if home is None else str(home / "config.json")
        raise ModelError(f"{where}: transformers cannot use it: {first_line(error)}") from error


def read_tokenizer(home: Path, pad_token: str | None) -> Any:
    """A tokenizer with a token to fill up batches with."""
    if not home.is_dir():
        raise ModelError(f"{home}: no such directory; expected one with a tokenizer")
    if not any((home / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ModelError(
            f"{home}: tokenizer.json is missing; name another directory as model.tokenizer"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(home)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"{home}: the tokenizer cannot be loaded: {first_line(error)}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{home}: expected a fast tokenizer (tokenizer.json), which can say where each token begins"
        )
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ConfigError(f"data.pad_token: {pad_token!r} is no token of {home}")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        eos = tokenizer.eos_token or "<|endoftext|>"
        raise ModelError(
            f"{home}: the tokenizer has no pad token; set data.pad_token, for example data.pad_token='{eos}'"
        )
    return tokenizer


def read_generation_config(home: Path | None) -> Any:
    """How to generate; None if the directory does not say."""
    from transformers import GenerationConfig

    if home is None or not (home / "generation_config.json").exists():
        return None
    try:
        return GenerationConfig.from_pretrained(home)
    except (ValueError, OSError, TypeError) as error:
        raise ModelError(
            f"{home / 'generation_config.json'}: transformers cannot use it: {first_line(error)}"
        ) from error


def check_vocabulary(files: ModelFiles, largest_id: int) -> None:
    """See that the model has a row for every token that occurs; tokenizers may know some that never do.

    Args:
        largest_id: of the tokens in the data.
    """
    rows = files.config.get_text_config().vocab_size
    largest_id = max(largest_id, files.tokenizer.pad_token_id)
    if largest_id >= rows:
        token = files.tokenizer.convert_ids_to_tokens(largest_id)
        raise ModelError(
            f"the data has token {largest_id} ({token!r}), but the model has only {rows} rows: it does not belong to the tokenizer in "
            f"{files.tokenizer.name_or_path}"
        )


def find_weights(home: Path) -> dict[str, Path]:
    """Name of each stored tensor -> its file.

    Raises:
        ModelError: files are missing, damaged, or of a kind that would have to be unpickled.
    """
    index = home / INDEX_NAME
    if (home / WEIGHTS_NAME).exists():  # first, as for transformers
        files = [WEIGHTS_NAME]
    elif index.exists():
        try:
            files = sorted(
                {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: not an index of safetensors files: {error!r}") from error
    else:
        pickles = sorted(path.name for path in home.glob("*.bin"))
        found = (
            f"found {', '.join(pickles)}, which only unpickling could read"
            if pickles
            else "found none"
        )
        raise ModelError(
            f"{home}: expected weights as {WEIGHTS_NAME}, or several files with {INDEX_NAME}; {found}"
        )
    missing = [name for name in files if not (home / name).exists()]
    if missing:
        raise ModelError(
            f"{home}: incomplete: {INDEX_NAME} names {', '.join(missing)}, which are not there"
        )
    where = {}
    for name in files:
        with open_safetensors(home / name) as file:
            where.update(dict.fromkeys(file.keys(), home / name))
    return where


@contextlib.contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """A safetensors file to read from."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: damaged, or no safetensors file: {error}") from error


def build_model(files: ModelFiles, config: ModelConfig) -> nn.Module:
    """The model with parameters on the meta device and real buffers."""
    dtype = getattr(torch, config.dtype)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(files.config),  # it writes dtype and more into what it is given
                dtype=dtype,
                attn_implementation=config.attention,
            )
    except (ValueError, ImportError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"the model cannot be built: {first_line(error)}") from error
    model.tie_weights()
    model.config.use_cache = False
    return model  # type: ignore[no-any-return]


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give memory to parameters on the meta device, sharded or not; buffers keep their values. The values are arbitrary."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    num_parameters = len([*model.parameters()])
    model.to_empty(device=device)
    model.tie_weights()  # type: ignore[operator]  # a tied parameter that is not sharded has become two
    assert len([*model.parameters()]) == num_parameters, "tied parameters stay tied"
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def load_weights(model: nn.Module, files: ModelFiles, *, seed: int) -> str:
    """Fill all parameters and stored buffers of a materialized model; says in one line from where.

    Args:
        seed: of random weights, which are the same on any number of ranks.

    Raises:
        ModelError: values are missing, or have another shape.
    """
    if files.weights is None:
        fill(model, draw_random(files.config, seed), "random weights")
        return f"random weights, seed {seed}"
    where = find_weights(files.weights)
    wanted = stored_names(model)
    unnamed = [names for names in wanted.values() if not any(name in where for name in names)]
    if not unnamed:
        fill(model, Stored(where), str(files.weights))
        surplus = sorted({*where} - {name for names in wanted.values() for name in names})
        if surplus:
            log.warning(
                "%s: %d tensors are not used: %s",
                files.weights,
                len(surplus),
                ", ".join(surplus[:5]),
            )
        return str(files.weights)
    # Names that transformers converts on the way in, or that are really missing.
    fill(model, convert_with_transformers(files.weights), str(files.weights))
    return f"{files.weights}, converted by transformers (each rank read all of it)"


class Source(Protocol):
    """Where values come from."""

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, slices: Slices) -> Tensor: ...


@dataclass
class Stored:
    """Values in safetensors files."""

    where: Mapping[str, Path]

    def names(self) -> set[str]:
        """All stored names."""
        return {*self.where}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        with open_safetensors(self.where[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str, slices: Slices) -> Tensor:
        """A part of one tensor."""
        with open_safetensors(self.where[name]) as file:
            return file.get_slice(name)[slices] if slices else file.get_tensor(name)  # type: ignore[no-any-return]


@dataclass
class InMemory:
    """Values that are loaded already."""

    tensors: Mapping[str, Tensor]

    def names(self) -> set[str]:
        """All names."""
        return {*self.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor."""
        return tuple(self.tensors[name].shape)

    def read(self, name: str, slices: Slices) -> Tensor:
        """A part of one tensor."""
        return self.tensors[name][slices] if slices else self.tensors[name]


def draw_random(config: Any, seed: int) -> InMemory:
    """The values that transformers draws for an architecture; a whole copy, so for small models."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return InMemory(model.state_dict())


def convert_with_transformers(home: Path) -> InMemory:
    """The values as transformers loads them, with its renamings and conversions."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                home, dtype="auto", output_loading_info=True
            )
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise ModelError(f"{home}: transformers cannot load it: {first_line(error)}") from error
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(
            f"{home}: incomplete: no values for {', '.join(missing[:5])} ({len(missing)} in all)"
        )
    return InMemory(model.state_dict())


def stored_names(model: nn.Module) -> dict[int, list[str]]:
    """Id of each tensor of the base model's state dict -> its names: several, if it is tied. Adapters are left out."""
    raw = model.state_dict(keep_vars=True)
    names = canonical_names(model, list(raw))
    found: dict[int, list[str]] = {}
    for name, tensor in raw.items():
        if not is_adapter(names[name]):
            found.setdefault(id(tensor), []).append(base_name(names[name]))
    return found


@torch.no_grad()
def fill(model: nn.Module, source: Source, origin: str) -> None:
    """Copy each rank's part of all values into place."""
    available = source.names()
    problems = []
    raw = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    for key, names in stored_names(model).items():
        name = next((each for each in names if each in available), None)
        if name is None:
            problems.append(f"{names[0]}: missing")
            continue
        tensor = raw[key]
        if source.shape(name) != tuple(tensor.shape):
            problems.append(f"{name}: shape {source.shape(name)}, expected {tuple(tensor.shape)}")
            continue
        fill_one(tensor, source, name)
    if problems:
        shown = "\n".join(problems[:20])
        raise ModelError(
            f"{origin}: {len(problems)} tensors do not fit the architecture in config.json\n{shown}"
        )


def fill_one(tensor: Tensor, source: Source, name: str) -> None:
    """Copy this rank's part of one value into place."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(source.read(name, ()))
        return
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if 0 in shape:
        return
    slices = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    tensor.to_local().copy_(source.read(name, slices))


def first_line(error: BaseException) -> str:
    """The gist of a library's error."""
    lines = str(error).strip().splitlines() or [""]
    gist = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {gist}"
