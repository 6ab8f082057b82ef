"""The standard library's functions and docstrings as a data set: complete lines, no leaks, the same every time."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backstay.testing.docstrings import (
    INSTRUCTION,
    Docstrings,
    distinct,
    read_module,
    write_docstrings,
)
from backstay.training.samples import read_samples

MODULE = '''\
class Box:
    @property
    async def size(self):  # of the box
        """Return how much there is
        in the box.

        More about it.
        """

        # counted each time
        text = """
outside
"""
        return len(text)


def shares_a_line(x):
    "The docstring is followed by code."; y = x
    return y


def has_nothing_else(x):
    """There is only a docstring in here."""


def has_a_short_docstring(x):
    """Too short."""
    y = x
    return y


def has_none(x):
    y = x
    return y


def is_short(x):
    """The source has too few lines."""
    return x
'''
SOURCE = '''\
@property
async def size(self):  # of the box
    # counted each time
    text = """
outside
"""
    return len(text)'''


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Docstrings:
    return write_docstrings(tmp_path_factory.mktemp("docstrings"), max_prompt_chars=600)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_docstring_is_cut_out_of_the_source_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODULE)
    (found,) = read_module(tmp_path / "m.py", "m")
    assert found.name == "m.Box.size"
    assert found.summary == "Return how much there is in the box."
    assert found.source == SOURCE


def test_a_file_that_cannot_be_parsed_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text("print 'hello'\n")
    assert list(read_module(tmp_path / "old.py", "old")) == []


def test_the_same_description_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODULE)
    samples = [sample for name in "ab" for sample in read_module(tmp_path / "m.py", name)]
    assert len(samples) == 2
    assert len(distinct(samples)) == 1


def test_there_are_thousands_of_samples_and_a_tenth_is_held_out(made: Docstrings) -> None:
    total = made.num_train + made.num_heldout
    assert total > 2000
    assert 0.07 < made.num_heldout / total < 0.13
    assert (len(rows(made.train)), len(rows(made.heldout))) == (made.num_train, made.num_heldout)


def test_the_lines_are_chats_that_a_recipe_reads(made: Docstrings) -> None:
    samples = list(read_samples(made.heldout))
    assert len(samples) == made.num_heldout
    for sample in samples:
        question, answer = sample.messages
        assert question["content"].startswith(f"{INSTRUCTION}\n\n")
        assert len(question["content"]) <= 600
        assert 20 <= len(answer["content"]) <= 300


def test_nothing_held_out_is_in_the_training_data(made: Docstrings) -> None:
    train, heldout = rows(made.train), rows(made.heldout)
    assert len({row["id"] for row in [*train, *heldout]}) == len(train) + len(heldout)
    for place in (0, 1):
        texts = [{row["messages"][place]["content"] for row in part} for part in (train, heldout)]
        assert texts[0].isdisjoint(texts[1])


def test_no_sample_is_from_a_test_package(made: Docstrings) -> None:
    parts = {part for row in rows(made.train) for part in row["id"].split(".")[:-1]}
    assert parts.isdisjoint({"test", "tests", "idlelib", "lib2to3", "site-packages"})


def test_the_program_writes_the_same_and_says_how_much(made: Docstrings, tmp_path: Path) -> None:
    options = ["--limit", "50", "--max-prompt-chars", "600"]
    found = subprocess.run(
        [sys.executable, "-m", "backstay.testing.docstrings", str(tmp_path), *options],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    train, heldout = (rows(tmp_path / name) for name in ("train.jsonl", "heldout.jsonl"))
    assert len(train) + len(heldout) == 50
    assert train == rows(made.train)[: len(train)]
    assert heldout == rows(made.heldout)[: len(heldout)]
    assert f"{len(train)} samples in {tmp_path / 'train.jsonl'}, {len(heldout)} in" in found.stdout


def test_torch_is_not_imported() -> None:
    code = "import sys, backstay.testing.docstrings; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
