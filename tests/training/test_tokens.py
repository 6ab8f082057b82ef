"""Token stores: what is learnt, what is too long, and when a store is made anew."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from backstay.errors import DataError
from backstay.testing.ranks import run_ranks
from backstay.testing.tiny_llm import make_tokenizer, write_chats
from backstay.training import tokens
from backstay.training.model import tokenizer_hash
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


def test_each_answer_of_a_chat_is_learnt_and_nothing_else(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    chat = [{"role": role, "content": f"{n}🌳é"} for n, role in enumerate(roles)]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": chat}))
    ids, learnt = store(tmp_path / "d.jsonl", tmp_path)[0]
    assert TOKENIZER.decode(ids[learnt]) == "2🌳é<|end|>\n4🌳é<|end|>\n"


def test_a_token_that_begins_in_the_prompt_is_not_learnt(tmp_path: Path) -> None:
    parts = json.loads(TOKENIZER.backend_tokenizer.to_str())
    parts["model"]["vocab"]["ab"] = len(TOKENIZER)
    parts["model"]["merges"] = [["a", "b"]]
    backend = Tokenizer.from_str(json.dumps(parts))
    merging = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    (tmp_path / "d.jsonl").write_text('{"prompt": "xa", "completion": "bc"}')
    how = Tokenizing(seq_len=9, too_long="error", use_template=False)
    made = make_store(tmp_path / "d.jsonl", tmp_path, tokenizer=merging, tokenizer_hash="", how=how)
    ids, learnt = TokenStore(made)[0]
    assert merging.convert_ids_to_tokens(ids) == ["x", "ab", "c", "<|end|>"]
    assert learnt.tolist() == [False, False, True, True]


def test_the_rules_for_tokens_are_part_of_a_tokenizers_hash() -> None:
    more = make_tokenizer()
    more.add_tokens(["<|new|>"])
    others = [make_tokenizer(chat_template="{{ messages[0].content }}"), more]
    assert tokenizer_hash(make_tokenizer()) == tokenizer_hash(TOKENIZER)
    assert tokenizer_hash(TOKENIZER) not in {tokenizer_hash(other) for other in others}


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
    assert str(cut).endswith("(1 truncated)")
    assert str(dropped).endswith("(1 dropped)")
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


def make_until_killed(_: int, __: int, file: Path, home: Path, at: str) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if at == "publishing":
        tokens.os.rename = die  # type: ignore[assignment]
    make_store(
        file,
        home,
        tokenizer=TOKENIZER,
        tokenizer_hash="t",
        how=WIDE,
        on_progress=die if at == "reading" else lambda _: None,
    )


@pytest.mark.parametrize("at", ["reading", "publishing"])
def test_a_store_whose_maker_was_killed_is_made_anew(at: str, tmp_path: Path) -> None:
    file = write_chats(tmp_path / "d.jsonl", 5)
    home = tmp_path / "home"
    ends = run_ranks(1, make_until_killed, file, home, at, distributed=False, allow_death=[0])
    assert ends == ["killed by signal 9"]
    assert len(list(home.iterdir())) == 1
    assert len(store(file, home)) == 5


def make_in_rank(_: int, __: int, file: Path, home: Path) -> str:
    return store(file, home).name


def test_two_makers_of_one_store_do_not_harm_each_other(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "d.jsonl", 600)
    one, other = run_ranks(2, make_in_rank, file, tmp_path / "home", distributed=False)
    assert one == other
    assert [path.name for path in (tmp_path / "home").iterdir()] == [one]


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
