"""Whatever is wrong with the input: one clear message, status 2 on every rank, nothing trained, nothing that was saved touched."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sft_runs import BASE, make_inputs, records, run_sft

from backstay import Catalog
from backstay.testing.tiny_llm import write_chats, write_tiny_llm
from backstay.training.runtime import BAD_INPUT

Inputs = dict[str, Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Inputs with which a run comes to its end."""
    return {**make_inputs(tmp_path_factory.mktemp("good")), "epochs": 1}


def data(text: str) -> Callable[[Path], Inputs]:
    def make(home: Path) -> Inputs:
        (home / "data.jsonl").write_text(text)
        return {"data.train": home / "data.jsonl"}

    return make


def model(**changes: Any) -> Callable[[Path], Inputs]:
    return lambda home: {"model.path": write_tiny_llm(home / "model", **changes)}


def incomplete_model(home: Path) -> Inputs:
    write_tiny_llm(home / "model")
    (home / "model" / "model.safetensors").unlink()
    return {"model.path": home / "model"}


def without_pad(home: Path) -> Inputs:
    write_tiny_llm(home / "model")
    file = home / "model" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["pad_token"]
    file.write_text(json.dumps(settings))
    return {"model.path": home / "model"}


def values(**given: Any) -> Callable[[Path], Inputs]:
    return lambda _: {key.replace("__", "."): value for key, value in given.items()}


CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
CASES: dict[str, tuple[Callable[[Path], Inputs], str]] = {
    "no data file": (values(data__train="none.jsonl"), "none.jsonl: cannot be read"),
    "a malformed line": (data(CHAT + "{oops\n"), "data.jsonl, line 2: not JSON"),
    "a missing field": (data('{"messages": [{"role": "user"}]}'), "messages'[0].content"),
    "no samples": (data("\n"), "nothing to train on"),
    "too long": (
        lambda home: {**data(CHAT * 30)(home), "data.seq_len": 8, "data.too_long": "error"},
        "line 1: 23 tokens, but data.seq_len is 8",
    ),
    "no chat template": (model(chat_template=None), "has no chat template"),
    "no pad token": (without_pad, "set data.pad_token, for example data.pad_token='<|end|>'"),
    "tokens that the model does not have": (
        model(vocab_size=100),
        "the model has only 100 rows: it does not belong to the tokenizer",
    ),
    "no model": (values(model__path="nowhere"), "nowhere: expected a Hugging Face model directory"),
    "an incomplete model": (incomplete_model, "expected weights as model.safetensors"),
    "a batch larger than the data": (
        values(batch_size=100),
        "is larger than the data: an epoch has",
    ),
    "a batch that does not fit the ranks": (
        values(batch_size=5),
        "expected a multiple of micro_batch_size x ranks = 1 x 2",
    ),
    "ranks that do not fit the mesh": (
        values(parallel__replicas=3),
        "parallel.replicas=3 does not divide the 2 ranks",
    ),
    "longer than the context": (values(data__seq_len=4096), "the model's context is 512 tokens"),
    "weights for other files": (values(data__weights="[1,2]"), "expected one per file"),
    "an unknown key": (values(optimizer__rate=1), "there is no key 'optimizer.rate'"),
    "a checkpoint that is not there": (
        values(resume="nowhere"),
        "resume=nowhere: there is no checkpoint",
    ),
    "a directory that cannot be written": (
        lambda home: {"out": (home / "file").touch() or home / "file" / "out"},
        "out: cannot be written: Not a directory",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_ends_in_one_message_on_every_rank(
    name: str, good: Inputs, tmp_path: Path, capfd: Any
) -> None:
    make, expected = CASES[name]
    given = {**good, **make(tmp_path)}
    out = Path(given.pop("out", tmp_path / "out"))
    assert run_sft(out, given, ranks=2) == [BAD_INPUT, BAD_INPUT]
    said = [line for line in capfd.readouterr().out.splitlines() if "error:" in line]
    assert len(said) == 1
    assert expected in said[0]
    assert not (out / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def finished(good: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert run_sft(out, good) == [0]
    return out


def content(out: Path) -> dict[str, bytes]:
    """All files of a run, but for those that only serve its next start."""
    found = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    passing = ("tokens/", ".lock")
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(passing)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (values(resume="never"), "holds checkpoints, and resume=never would not go on"),
        (values(seed=7), "seed: 0 -> 7"),
        (lambda home: {"data.train": write_chats(home / "d.jsonl", 21)}, "content of data"),
        (model(hidden_size=48), "content of model"),
        (
            lambda home: {**model(hidden_size=48)(home), "allow_changes": "true"},
            "model.norm.weight",
        ),
    ],
    ids=["never", "seed", "data", "model", "a model that does not fit"],
)
def test_what_would_mix_two_runs_is_refused_and_nothing_is_touched(
    change: Callable[[Path], Inputs],
    expected: str,
    good: Inputs,
    finished: Path,
    tmp_path: Path,
    capfd: Any,
) -> None:
    before = content(finished)
    assert run_sft(finished, {**good, **change(tmp_path)}, ranks=2) == [BAD_INPUT, BAD_INPUT]
    assert expected in capfd.readouterr().out
    assert content(finished) == before


def test_a_root_whose_checkpoints_are_all_damaged_is_no_fresh_start(
    good: Inputs, finished: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    for file in (out / "checkpoints").glob("step-*/weights/*.distcp"):
        file.write_bytes(file.read_bytes()[:-1])
    before = content(out)
    assert run_sft(out, good, ranks=2) == [BAD_INPUT, BAD_INPUT]
    assert "none that is whole" in capfd.readouterr().out
    assert content(out) == before


def test_another_seed_goes_through_where_that_is_asked_for(
    good: Inputs, finished: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    again = {**good, "seed": 7, "epochs": 2, "allow_changes": "true"}
    assert run_sft(out, again) == [0]
    assert "changed since the checkpoint: seed: 0 -> 7" in capfd.readouterr().out
    assert max(records(out)) == 2 * max(records(finished))
    assert run_sft(out, {**again, "allow_changes": "false"}) == [0]


def test_fewer_epochs_than_were_trained_leave_nothing_to_train(
    good: Inputs, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "out"
    assert run_sft(out, {**good, "epochs": 2}) == [0]
    capfd.readouterr()
    assert run_sft(out, good) == [0]
    assert "nothing left to train" in capfd.readouterr().out


@pytest.mark.parametrize("rule", ["truncate", "drop"])
def test_what_becomes_of_long_samples_is_said(
    rule: str, good: Inputs, tmp_path: Path, capfd: Any
) -> None:
    long = json.dumps(
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 99}]}
    )
    given = {**good, **data(CHAT * 4 + f"{long}\n" * 2)(tmp_path), "data.packing": "false"}
    given |= {"data.seq_len": 60, "data.too_long": rule, "max_steps": 1}
    assert run_sft(tmp_path / "out", given) == [0]
    kept = 6 if rule == "truncate" else 4
    said = capfd.readouterr().out
    assert f"data.jsonl: {kept} samples, " in said
    assert f"(2 {'truncated' if rule == 'truncate' else 'dropped'})" in said


def test_other_data_goes_through_where_that_is_asked_for(
    good: Inputs, finished: Path, tmp_path: Path, capfd: Any
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    more = {**good, "data.train": write_chats(tmp_path / "d.jsonl", 40, seed=3), "epochs": 2}
    assert run_sft(out, {**more, "allow_changes": "true"}) == [0]
    assert "changed since the checkpoint: content of data" in capfd.readouterr().out
    latest = Catalog(out / "checkpoints").latest()
    assert latest is not None
    assert latest.step > 2


def test_the_program_itself_says_it_on_stderr_with_status_2(tmp_path: Path) -> None:
    overrides = [f"{key}={value}" for key, value in {**BASE, "out": tmp_path, "epochs": 0}.items()]
    found = subprocess.run(
        [sys.executable, "-m", "backstay.recipes.sft", *overrides],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == BAD_INPUT
    assert found.stdout == ""
    assert found.stderr.startswith("error: expected epochs >= 1")
    assert len(found.stderr.splitlines()) == 1
