"""Preference files: all forms of a pair, what is wrong with others, and batches of pairs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from backstay.errors import DataError, ModelError
from backstay.testing.tiny_llm import make_tokenizer, write_preferences, write_tiny_llm
from backstay.training.batches import IGNORED
from backstay.training.distill import check_same_vocabulary
from backstay.training.model import ModelConfig, open_model
from backstay.training.pairs import CollatePairs, Pairs
from backstay.training.preference_samples import read_pairs
from backstay.training.sampler import NO_SAMPLE
from backstay.training.tokens import Tokenizing, TokenStore, make_store

TOKENIZER = make_tokenizer()
USER = {"role": "user", "content": "the birch"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("said", "the"))
HOW = Tokenizing(seq_len=96, too_long="truncate", use_template=True, kind="pairs")


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_forms_of_a_pair_are_the_same_one(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl",
        {"prompt": USER["content"], "chosen": GOOD["content"], "rejected": BAD["content"]},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    )
    found = [(chosen.messages, rejected.messages) for chosen, rejected in read_pairs(file)]
    assert found == [((USER, GOOD), (USER, BAD))] * 4
    store = TokenStore(make_store(file, tmp_path, tokenizer=TOKENIZER, tokenizer_hash="t", how=HOW))
    assert len(store) == 8
    for number in range(0, 8, 2):
        for side, answer in ((0, GOOD), (1, BAD)):
            ids, learnt = store[number + side]
            assert TOKENIZER.decode(ids[learnt]).startswith(answer["content"])


def test_only_the_answer_is_learnt_of_several_turns(tmp_path: Path) -> None:
    turns = [USER, BAD, USER]
    file = write(tmp_path / "a.jsonl", {"chosen": [*turns, GOOD], "rejected": [*turns, BAD]})
    store = TokenStore(make_store(file, tmp_path, tokenizer=TOKENIZER, tokenizer_hash="t", how=HOW))
    ids, learnt = store[0]
    assert learnt.any()
    assert not learnt[: len(ids) // 2].any()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "found the fields"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "field 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "field 'prompt': missing"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "no common prompt"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [BAD]}, "nothing follows the prompt"),
        ([], "found a list"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(row: Any, message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"}, row)
    with pytest.raises(DataError, match=message) as caught:
        list(read_pairs(file))
    assert f"{file}, line 2" in str(caught.value)


def test_a_pair_stays_together(tmp_path: Path) -> None:
    file = write_preferences(tmp_path / "a.jsonl", 5)
    store = TokenStore(make_store(file, tmp_path, tokenizer=TOKENIZER, tokenizer_hash="t", how=HOW))
    pairs = Pairs([store])
    batch = CollatePairs(0)([pairs[3], pairs[1], pairs[NO_SAMPLE]])
    assert batch.sample_ids == (3, 1, NO_SAMPLE)
    assert batch.weights.tolist() == [1, 1, 0]
    assert batch.num_targets == 2
    for row, number in enumerate((6, 2, None, 7, 3, None)):
        if number is None:
            assert (batch.targets[row] == IGNORED).all()
            continue
        ids = torch.from_numpy(store[number][0].astype("int64"))
        assert torch.equal(batch.ids[row, : len(ids)], ids)


def test_a_teacher_of_another_tongue_is_refused(tmp_path: Path) -> None:
    """Shorter vocabulary, and the same number of other tokens."""
    ours = open_model(ModelConfig(path=str(write_tiny_llm(tmp_path / "student"))))
    same = open_model(ModelConfig(path=str(write_tiny_llm(tmp_path / "same", seed=3))))
    check_same_vocabulary(ours, same)
    home = write_tiny_llm(tmp_path / "other")
    fields = json.loads((home / "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (home / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=r"token \d+ is .* for the student"):
        check_same_vocabulary(ours, open_model(ModelConfig(path=str(home))))
    home = write_tiny_llm(tmp_path / "padded")
    fields = json.loads((home / "config.json").read_text())
    fields["vocab_size"] += 8
    (home / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="vocab_size is"):
        check_same_vocabulary(ours, open_model(ModelConfig(path=str(home))))
