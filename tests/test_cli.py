"""The command line teaches its use, and its exit status says how things went."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backstay.cli import app
from backstay.recipes import RECIPES
from backstay.recipes.sft import SftConfig
from backstay.testing.tiny_llm import write_chats, write_tiny_llm
from backstay.training.config import load_config


def call(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return found.exit_code, found.output


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([], ["train", "recipes", "config", "export"]),
        (["train"], ["backstay train sft", "SIGTERM", "--nproc", "--config"]),
        (["recipes"], ["List recipes"]),
        (["config"], ["--save", "backstay config sft"]),
        (["export"], ["--dtype", "--max-shard-bytes", "backstay export"]),
    ],
)
def test_help_says_what_to_type(command: list[str], expected: list[str]) -> None:
    status, output = call(*command, "--help")
    assert status == 0
    for text in expected:
        assert text in output


def test_recipes_are_listed_with_their_files() -> None:
    status, output = call("recipes")
    assert status == 0
    assert all(name in output for name in RECIPES)


def test_a_configuration_is_printed_or_copied_but_nothing_is_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    assert call("config", "sft") == (0, RECIPES["sft"].config.read_text())
    assert call("config", "sft", "--save", str(file))[0] == 0
    assert file.read_text() == RECIPES["sft"].config.read_text()
    status, output = call("config", "sft", "--save", str(file))
    assert status == 2
    assert "exists" in output


def test_a_configuration_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    status, output = call("config", "sft", "--save", str(tmp_path / "none" / "my.yaml"))
    assert status == 2
    assert "cannot be written: No such file or directory" in output


@pytest.mark.parametrize("command", ["train", "config"])
def test_an_unknown_recipe_is_answered_with_those_that_there_are(command: str) -> None:
    status, output = call(command, "stf")
    assert status == 2
    assert "no recipe 'stf'; known are sft" in output


def test_an_export_of_nothing_is_an_error(tmp_path: Path) -> None:
    status, output = call("export", str(tmp_path / "step-00000001"), str(tmp_path / "out"))
    assert status == 2
    assert "error: " in output
    status, output = call("export", str(tmp_path), str(tmp_path / "out"), "--dtype", "int8")
    assert status == 2
    assert "int8" in output


def test_what_is_printed_can_be_loaded(tmp_path: Path) -> None:
    _, output = call("config", "sft")
    (tmp_path / "my.yaml").write_text(output)
    config = load_config(SftConfig, file=tmp_path / "my.yaml", overrides=["out=o"])
    assert config == SftConfig(out="o")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["optimizr.lr=1"], "did you mean optimizer.lr?"),
        (["epochs=2"], "out: no value given"),
        (["--config", "none.yaml"], "none.yaml: cannot be read as a YAML file"),
        (["--nproc", "0"], "--nproc"),
        (["--nprocs", "2"], "No such option"),
    ],
)
def test_a_wrong_argument_ends_with_status_2_before_anything_starts(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # the recipe's own program is called with others
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    status, output = call("train", "sft", *arguments)
    assert status == 2
    assert expected in output


def test_without_arguments_there_is_help_and_an_unknown_command_is_named() -> None:
    assert "recipes" in call()[1]
    status, output = call("nonsense")
    assert status == 2
    assert "No such command 'nonsense'" in output


def run(home: Path, nproc: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The program itself, on a tiny model and eight samples."""
    write_tiny_llm(home / "model")
    write_chats(home / "d.jsonl", 8)
    command = [sys.executable, "-m", "backstay.cli", "train", "sft", "--nproc", str(nproc)]
    inputs = ["model.path=model", "data.train=d.jsonl", "data.seq_len=128", "out=out"]
    return subprocess.run(
        [*command, *inputs, *overrides], cwd=home, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("nproc", [1, 2])
def test_training_from_the_command_line(nproc: int, tmp_path: Path) -> None:
    done = run(tmp_path, nproc, "batch_size=2")
    assert done.returncode == 0, done.stderr
    assert "exported to" in done.stdout
    assert (tmp_path / "out" / "export" / "final" / "model.safetensors").exists()


def test_bad_input_of_several_ranks_is_said_once_and_is_status_2(tmp_path: Path) -> None:
    bad = run(tmp_path, 2, "batch_size=3", "micro_batch_size=2")
    assert bad.returncode == 2
    assert bad.stderr.count("error:") == 1
    assert bad.stderr.splitlines()[-1].startswith("error: batch_size=3")
