"""Token stores: what is learnt, what is too long, and when a store is made anew."""

import json
from pathlib import Path
from typing import Any

import pytest

from backstay.errors import DataError
from backstay.testing.tiny_llm import make_tokenizer, write_chats
from backstay.training.tokens import Tokenizing, TokenStore, make_store

TOKENIZER = make_tokenizer()
WIDE = Tokenizing(seq_len=400, too_long="truncate", use_template=True)


def store(file: Path, home: Path, how: Tokenizing = WIDE, name: str = "t") -> TokenStore:
    return TokenStore(make_store(file, home, tokenizer=TOKENIZER, tokenizer_hash=name, how=how))


def write(file: Path, *answers: str) -> Path:
    rows = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": a}] for a in answers
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("answer", ["plain", "naïve café", "🌳 and 森", "", "two\n\nlines "])
def test_the_loss_is_on_the_answer_and_its_end(answer: str, tmp_path: Path) -> None:
    ids, learnt = store(write(tmp_path / "d.jsonl", answer), tmp_path)[0]
    assert TOKENIZER.decode(ids[learnt]) == f"{answer}<|end|>\n"
    assert (
        TOKENIZER.decode(ids) == f"<|start|>user\nq<|end|>\n<|start|>assistant\n{answer}<|end|>\n"
    )


def test_long_samples_are_cut_dropped_or_refused_and_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", "x", "y" * 100, "z")
    found: dict[str, Any] = {
        rule: store(file, tmp_path, Tokenizing(seq_len=60, too_long=rule, use_template=True))
        for rule in ("truncate", "drop")
    }
    cut, dropped = found["truncate"].counts, found["drop"].counts
    assert (cut.kept, cut.truncated, cut.dropped) == (3, 1, 0)
    assert (dropped.kept, dropped.truncated, dropped.dropped) == (2, 0, 1)
    assert max(found["truncate"].lengths()) == 60
    strict = Tokenizing(seq_len=60, too_long="error", use_template=True)
    with pytest.raises(DataError, match=r"line 2: \d+ tokens, but data.seq_len is 60"):
        store(file, tmp_path, strict)


def test_a_sample_whose_answer_was_cut_off_altogether_is_dropped(tmp_path: Path) -> None:
    short = Tokenizing(seq_len=10, too_long="truncate", use_template=True)
    counts = store(write(tmp_path / "d.jsonl", "answer"), tmp_path, short).counts
    assert (counts.kept, counts.dropped) == (0, 1)


def test_a_store_is_found_again_and_made_anew_when_anything_changes(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "d.jsonl", 5)
    first = store(file, tmp_path)
    stamp = (first.path / "ids.npy").stat().st_mtime_ns
    assert (store(file, tmp_path).path / "ids.npy").stat().st_mtime_ns == stamp
    others = [
        store(file, tmp_path, Tokenizing(seq_len=300, too_long="truncate", use_template=True)),
        store(file, tmp_path, name="another tokenizer"),
        store(write_chats(file, 6), tmp_path),
    ]
    assert len({each.name for each in [first, *others]}) == 4


def test_a_file_with_a_broken_line_leaves_nothing_behind(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", "x")
    file.write_text(file.read_text() + "{")
    with pytest.raises(DataError, match="line 2"):
        store(file, tmp_path / "home")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_chat_needs_a_template_and_plain_rows_can_do_without(tmp_path: Path) -> None:
    bare = make_tokenizer(chat_template=None)
    plain = Tokenizing(seq_len=400, too_long="error", use_template=False)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')

    def tokenize(file: Path, how: Tokenizing) -> TokenStore:
        made = make_store(file, tmp_path, tokenizer=bare, tokenizer_hash="b", how=how)
        return TokenStore(made)

    with pytest.raises(DataError, match="has no chat template"):
        tokenize(write(tmp_path / "d.jsonl", "x"), plain)
    with pytest.raises(DataError, match="use_template"):
        tokenize(rows, WIDE)
    assert bare.decode(tokenize(rows, plain)[0][0]) == "ab<|end|>"
