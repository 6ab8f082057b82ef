"""Configurations: layers, types, the nearest right key, and what changed between a run and its resumption."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from backstay.errors import ConfigChanged, ConfigError
from backstay.recipes import RECIPES
from backstay.recipes.sft import SftConfig
from backstay.training.config import compare, keys_of, load_config, to_plain, to_yaml
from backstay.training.resume import Earlier, check_changes


def load(*overrides: str, file: Path | None = None) -> SftConfig:
    return load_config(SftConfig, file=file, overrides=["out=o", *overrides])


def test_overrides_go_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optimizer:\n  lr: 3e-4\n  eps: 1e-6\nepochs: 4\n")
    config = load("optimizer.lr=1e-3", "data.train=a.jsonl", file=file)
    assert (config.optimizer.lr, config.optimizer.eps, config.epochs) == (1e-3, 1e-6, 4)
    assert config.data.train == ("a.jsonl",)
    assert load("data.train=[a,b]").data.train == ("a", "b")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizr.lr=1", r"no key 'optimizr.lr'; did you mean optimizer.lr\?"),
        ("lr=1", r"did you mean optimizer.lr\?"),
        ("data.sequence_len=5", r"did you mean data.seq_len\?"),
        ("optimizer.lr=fast", "optimizer.lr: Value 'fast'"),
        ("optimizer.lr=-1", "expected a number > 0"),
        ("epochs=1.5", "epochs: Value '1.5'"),
        ("parallel.precision=fp8", "parallel.precision: Invalid value 'fp8', expected one of"),
        ("optimizer=5", "optimizer"),
        ("epochs", "expected dotted.key=value"),
        ("data.train=[a", "cannot be read as YAML"),
    ],
)
def test_a_wrong_override_is_named_with_what_would_be_right(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("out=", "out: "),
        ("out=''", "out: expected a directory"),
        ("seed=-1", "seed=-1: expected a number from 0"),
        ("epochs=0", "expected epochs >= 1"),
        ("max_steps=0", "max_steps >= 1"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas="),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("checkpoint.every_steps=0", "checkpoint.every_steps=0: expected a number >= 1"),
        ("checkpoint.every_s=0", "checkpoint.every_s=0"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last=0"),
        ("checkpoint.keep_best=2", "set data.eval, too"),
        ("checkpoint.bandwidth_bytes_per_s=-1", "checkpoint.bandwidth_bytes_per_s=-1"),
        ("checkpoint.mode=later", "checkpoint.mode: Invalid value 'later'"),
        ("eval.every_steps=0", "eval.every_steps=0"),
        ("export.every_steps=0", "export.every_steps=0"),
        ("export.max_shard_bytes=0", "export.max_shard_bytes=0"),
        ("log.every_steps=0", "log.every_steps=0"),
        ("parallel.replicas=0", "parallel.replicas=0"),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(
    override: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(override)


def test_keeping_the_best_needs_something_to_measure_by() -> None:
    assert load("checkpoint.keep_best=2", "data.eval=e.jsonl").checkpoint.keep_best == 2


def test_later_overrides_go_over_earlier_ones() -> None:
    assert load("epochs=2", "epochs=3").epochs == 3


def test_all_unknown_keys_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optimizer:\n  rate: 1\nepoch: 2\n")
    with pytest.raises(ConfigError) as caught:
        load(file=file)
    assert "'optimizer.rate'" in str(caught.value)
    assert "did you mean epochs?" in str(caught.value)


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [1\n", None])
def test_a_file_that_is_no_configuration_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=str(file)):
        load(file=file)


def test_a_value_that_must_be_given_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="out: no value given"):
        load_config(SftConfig)


def test_a_configuration_survives_being_written(tmp_path: Path) -> None:
    config = load("data.train=[a,b]", "model.config={model_type: llama}", "max_steps=7")
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(SftConfig, file=tmp_path / "c.yaml") == config


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipes_file_is_a_configuration_of_its_program(recipe: Any) -> None:
    schema = importlib.import_module(recipe.module).METHOD.schema
    given = ["out=o", *(["teacher.path=t"] if recipe.module.endswith("kd") else [])]
    assert load_config(schema, file=recipe.config, overrides=given).out == "o"


def test_the_file_of_sft_names_every_key_with_its_default() -> None:
    recipe = RECIPES["sft"]
    loaded = load_config(SftConfig, file=recipe.config, overrides=["out=o"])
    assert loaded == load()
    written = OmegaConf.to_container(OmegaConf.load(recipe.config))
    sections = {key for key in keys_of(SftConfig) if "." not in key} - {"out"}
    assert {*written} == sections
    for name, value in written.items():
        if isinstance(value, dict) and dataclasses.is_dataclass(getattr(loaded, name)):
            assert {*value} == {field.name for field in dataclasses.fields(getattr(loaded, name))}


def test_changes_are_found_and_those_that_would_mix_two_runs_are_marked() -> None:
    before, now = to_plain(load()), to_plain(load("seed=1", "optimizer.lr=1", "data.train=x"))
    changes = {change.key: change for change in compare(SftConfig, before, now)}
    assert {*changes} == {"seed", "optimizer.lr", "data.train"}
    assert [key for key, change in changes.items() if change.is_fixed] == ["seed"]
    assert str(changes["optimizer.lr"]) == "optimizer.lr: 2e-05 -> 1.0"
    assert compare(SftConfig, before, before) == []


def test_a_resumption_refuses_what_would_mix_two_runs_unless_told_to() -> None:
    earlier = Earlier(Path("r"), 5, to_plain(load()), {"model": "a", "data": ["x"]})
    same = {"model": "a", "data": ["x"]}
    lower = to_plain(load("optimizer.lr=1"))
    assert check_changes(SftConfig, earlier, lower, same, allow=False) == [
        "optimizer.lr: 2e-05 -> 1.0"
    ]
    other = {"model": "b", "data": ["x"]}
    with pytest.raises(ConfigChanged, match="content of model: a -> b"):
        check_changes(SftConfig, earlier, to_plain(load()), other, allow=False)
    with pytest.raises(ConfigChanged, match="seed: 0 -> 1"):
        check_changes(SftConfig, earlier, to_plain(load("seed=1")), same, allow=False)
    assert len(check_changes(SftConfig, earlier, to_plain(load("seed=1")), other, allow=True)) == 2
