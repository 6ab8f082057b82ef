"""Loading shard by shard gives each rank its part of exactly what transformers loads, and broken directories are named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from backstay.errors import BackstayError, ConfigError, ModelError
from backstay.testing.equality import assert_bit_equal, state_bytes
from backstay.testing.ranks import run_ranks
from backstay.testing.tiny_llm import write_tiny_llm
from backstay.training.model import (
    ModelConfig,
    build_model,
    load_weights,
    materialize,
    open_model,
)
from backstay.training.parallel import ParallelConfig, make_mesh, spread

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llm(tmp_path_factory.mktemp("tiny"))


def load(config: ModelConfig, parallel: ParallelConfig, world_size: int) -> torch.nn.Module:
    files = open_model(config)
    model = build_model(files, config)
    spread(model, parallel, make_mesh(parallel, CPU, world_size))
    materialize(model, CPU)
    load_weights(model, files, seed=3)
    return model


def load_in_rank(
    rank: int, world_size: int, config: ModelConfig, parallel: ParallelConfig
) -> tuple[dict[str, str], bool, int]:
    model = load(config, parallel, world_size)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    return state_bytes(model), is_tied, len([*model.parameters()])


@pytest.mark.parametrize(
    ("world_size", "replicas", "precision"),
    [
        (1, 1, "float32"),
        (1, 1, "bfloat16"),
        (2, 1, "float32"),
        (3, 1, "float32"),
        (4, 2, "float32"),
    ],
)
def test_every_rank_gets_its_part_of_what_transformers_loads(
    world_size: int, replicas: int, precision: Any, tiny: Path
) -> None:
    """P48 as well: tied weights are one parameter after meta init, sharding and loading."""
    expected = AutoModelForCausalLM.from_pretrained(tiny)
    parallel = ParallelConfig(replicas=replicas, precision=precision)
    found = run_ranks(world_size, load_in_rank, ModelConfig(path=str(tiny)), parallel, timeout_s=60)
    for state, is_tied, num_parameters in found:
        assert_bit_equal(state_bytes(expected), state)
        assert is_tied
        assert num_parameters == len([*expected.parameters()])


def test_a_rank_may_have_no_part_of_a_tensor(tmp_path: Path) -> None:
    write_tiny_llm(tmp_path, intermediate_size=4)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = run_ranks(3, load_in_rank, ModelConfig(path=str(tmp_path)), ParallelConfig())
    assert_bit_equal(state_bytes(expected), found[2][0])


def memory_of_loading(rank: int, world_size: int, path: Path) -> int:
    """Bytes that this rank needed at most beyond what it had when the model was built, but empty."""
    config, parallel = ModelConfig(path=str(path)), ParallelConfig()
    files = open_model(config)
    model = build_model(files, config)
    spread(model, parallel, make_mesh(parallel, CPU, world_size))
    before = memory_bytes("VmRSS")
    materialize(model, CPU)
    load_weights(model, files, seed=0)
    return memory_bytes("VmHWM") - before


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def test_a_rank_needs_memory_for_its_own_part_only(tmp_path: Path) -> None:
    """Its half, and the largest tensor while that is read; a whole copy would be more than twice as much."""
    write_tiny_llm(tmp_path, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4)
    whole = (tmp_path / "model.safetensors").stat().st_size
    assert whole > 180e6
    for needed in run_ranks(2, memory_of_loading, tmp_path):
        assert needed < 0.65 * whole


def test_several_files_and_another_dtype(tmp_path: Path, tiny: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(tmp_path, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, tmp_path)
    assert len([*tmp_path.glob("*.safetensors")]) > 2
    config = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    (found, _, _) = run_ranks(1, load_in_rank, config, ParallelConfig())[0]
    expected = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    assert_bit_equal(state_bytes(expected), found)


def test_one_file_goes_before_an_index_that_was_left_over(tmp_path: Path, tiny: Path) -> None:
    write_tiny_llm(tmp_path, seed=1)
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(tiny / "model.safetensors", tmp_path)
    (found, _, _) = run_ranks(1, load_in_rank, ModelConfig(path=str(tmp_path)), ParallelConfig())[0]
    assert_bit_equal(state_bytes(AutoModelForCausalLM.from_pretrained(tmp_path)), found)
    assert_bit_equal(state_bytes(AutoModelForCausalLM.from_pretrained(tiny)), found)


def test_names_that_transformers_converts_are_converted(tmp_path: Path) -> None:
    write_tiny_llm(tmp_path, model_type="mixtral", num_local_experts=4, tie_word_embeddings=False)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = run_ranks(2, load_in_rank, ModelConfig(path=str(tmp_path)), ParallelConfig())
    assert_bit_equal(state_bytes(expected), found[0][0])


def test_random_weights_do_not_depend_on_the_number_of_ranks(tiny: Path) -> None:
    shape = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    shape |= {"intermediate_size": 48, "num_attention_heads": 4, "tie_word_embeddings": True}
    config = ModelConfig(config=shape, tokenizer=str(tiny))
    one, two = (run_ranks(size, load_in_rank, config, ParallelConfig())[0] for size in (1, 2))
    assert_bit_equal(one[0], two[0])


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def damage(name: str, home: Path) -> ModelConfig:
    """Break a copy of a model directory in one way."""
    weights = home / "model.safetensors"
    config = ModelConfig(path=str(home))
    if name == "no config":
        (home / "config.json").unlink()
    elif name == "no weights":
        weights.unlink()
    elif name == "only a pickle":
        weights.rename(home / "pytorch_model.bin")
    elif name == "no tokenizer":
        (home / "tokenizer.json").unlink()
        (home / "tokenizer_config.json").unlink()
    elif name == "cut off":
        weights.write_bytes(weights.read_bytes()[:100])
    elif name == "a file of the index is missing":
        weights.unlink()
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (home / "model.safetensors.index.json").write_text(json.dumps(index))
    elif name == "no index of files":
        weights.unlink()
        (home / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    elif name == "a file of the index has other tensors":
        weights.unlink()
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "other.safetensors"}}
        (home / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file({"other": torch.zeros(1)}, home / "other.safetensors", {"format": "pt"})
    elif name == "a broken tokenizer":
        (home / "tokenizer.json").write_text("{")
    elif name == "a slow tokenizer":
        (home / "tokenizer.json").unlink()
        ByT5Tokenizer().save_pretrained(home)
    elif name == "a broken way to generate":
        (home / "generation_config.json").write_text("{")
    elif name == "heads that do not fit":
        change(home / "config.json", num_attention_heads=5)
    elif name == "a text for a number":
        change(home / "config.json", hidden_size="x")
    elif name == "an unknown activation":
        change(home / "config.json", hidden_act="nonsense")
    elif name == "another shape":
        tensors = load_file(weights)
        save_file({**tensors, "model.norm.weight": torch.zeros(5)}, weights, {"format": "pt"})
    elif name == "a tensor is missing":
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif name == "no pad token":
        settings = json.loads((home / "tokenizer_config.json").read_text())
        del settings["pad_token"]
        (home / "tokenizer_config.json").write_text(json.dumps(settings))
    elif name == "not there":
        return ModelConfig(path=str(home / "none"))
    elif name == "an unknown architecture":
        (home / "config.json").write_text('{"model_type": "no_such_model"}')
    return config


DAMAGES = {
    "no config": "config.json is missing",
    "no weights": "expected weights as model.safetensors.*found none",
    "only a pickle": "pytorch_model.bin, which only unpickling could read",
    "no tokenizer": "tokenizer.json is missing",
    "cut off": "model.safetensors: damaged",
    "a file of the index is missing": "model-00001-of-00002.safetensors, which are not there",
    "no index of files": "model.safetensors.index.json: not an index of safetensors files",
    "a file of the index has other tensors": "no values for ",
    "a broken tokenizer": "the tokenizer cannot be loaded",
    "a slow tokenizer": "expected a fast tokenizer",
    "a broken way to generate": "generation_config.json: transformers cannot use it",
    "heads that do not fit": "config.json: transformers cannot use it.*not a multiple of",
    "a text for a number": "config.json: transformers cannot use it.*expected int, got str",
    "an unknown activation": "the model cannot be built: KeyError: 'nonsense'",
    "another shape": r"model.norm.weight: shape \(5,\), expected \(32,\)",
    "a tensor is missing": "no values for model.norm.weight",
    "no pad token": "set data.pad_token",
    "not there": "expected a Hugging Face model directory",
    "an unknown architecture": "transformers cannot use it",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_broken_directory_is_named(name: str, tiny: Path, tmp_path: Path) -> None:
    home = tmp_path / "model"
    shutil.copytree(tiny, home)
    config = damage(name, home)

    def use() -> None:
        files = open_model(config)
        model = build_model(files, config)
        materialize(model, CPU)
        load_weights(model, files, seed=0)

    with pytest.raises(ModelError, match=f"(?s){DAMAGES[name]}"):
        use()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ModelConfig(), "either model.path"),
        (ModelConfig(path="x", config={"model_type": "llama"}), "either model.path"),
        (ModelConfig(config={"model_type": "llama"}), "model.tokenizer"),
        (ModelConfig(config={"hidden_size": 8}, tokenizer="."), "model_type is missing"),
    ],
)
def test_a_model_is_a_path_or_an_architecture(config: ModelConfig, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        open_model(config)


def test_another_pad_token_can_be_named(tiny: Path) -> None:
    assert open_model(ModelConfig(path=str(tiny)), pad_token="a").tokenizer.pad_token == "a"
    with pytest.raises(BackstayError, match="is no token"):
        open_model(ModelConfig(path=str(tiny)), pad_token="<none>")
