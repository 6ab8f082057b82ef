"""Lines of data sets: what is a sample, what is not and why, and which of its text is learnt."""

import json
from pathlib import Path

import pytest

from backstay.errors import DataError
from backstay.testing.tiny_llm import make_tokenizer
from backstay.training.samples import parse_sample, read_samples, render

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
BROKEN = {
    "no JSON": ('{"messages": [', "not JSON"),
    "a list": ("[1]", "expected an object"),
    "no known field": ('{"text": "x"}', "found the fields"),
    "no messages": ('{"messages": []}', "field 'messages'"),
    "a text for a message": ('{"messages": ["x"]}', r"messages'\[0\]"),
    "no content": (
        '{"messages": [{"role": "user"}]}',
        r"\[0\].content: expected a text, found nothing",
    ),
    "a number for content": (
        json.dumps({"messages": [USER, {"role": "assistant", "content": 5}]}),
        r"\[1\].content: expected a text, found a int \(5\)",
    ),
    "null": ("null", "expected an object"),
    "a text for a chat": ('{"messages": "hi"}', r"field 'messages': expected a list of messages"),
    "no role": ('{"messages": [{"content": "x"}]}', r"\[0\].role: expected a text, found nothing"),
    "parts for content": (
        '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
        r"\[0\].content: expected a text, found a list",
    ),
    "half a character": (
        '{"messages": [{"role": "user", "content": "ab\\ud83d"}]}',
        r"\[0\].content: .* at character 2 is half of a surrogate pair",
    ),
    "brackets without end": ("[" * 100_000, "not JSON"),
    "a number for a prompt": (
        '{"prompt": 2, "completion": "x"}',
        r"field 'prompt': expected a text, found a int \(2\)",
    ),
    "nothing to learn": (json.dumps({"messages": [USER]}), "no message with role 'assistant'"),
    "no completion": ('{"prompt": "x"}', "field 'completion': expected a text, found nothing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_named_by_file_line_and_field(name: str, tmp_path: Path) -> None:
    line, expected = BROKEN[name]
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": [USER, ANSWER]}) + f"\n\n{line}\n")
    with pytest.raises(DataError, match=expected) as caught:
        list(read_samples(file))
    assert str(caught.value).startswith(f"{file}, line 3")


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        list(read_samples(tmp_path / "none.jsonl"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        list(read_samples(tmp_path / "binary"))


def test_a_byte_order_mark_and_odd_line_ends_are_no_part_of_a_sample(tmp_path: Path) -> None:
    line = json.dumps({"messages": [USER, {**ANSWER, "content": "a\u2028b"}]}, ensure_ascii=False)
    (tmp_path / "d.jsonl").write_bytes(f"\ufeff{line}\r\n{line}".encode())
    samples = list(read_samples(tmp_path / "d.jsonl"))
    assert [sample.messages[1]["content"] for sample in samples] == ["a\u2028b"] * 2


def learnt(
    line: dict[str, object], *, use_template: bool = True, template: str | None = None
) -> list[str]:
    """The stretches of a sample that are learnt."""
    tokenizer = make_tokenizer() if template is None else make_tokenizer(chat_template=template)
    text = render(parse_sample(json.dumps(line), "here"), tokenizer, use_template=use_template)
    return [text.text[start:stop] for start, stop in text.spans]


def test_what_the_assistant_says_is_learnt_with_the_token_that_ends_it() -> None:
    turns = [{"role": "system", "content": "s"}, USER, ANSWER, USER, {**ANSWER, "content": "b"}]
    assert learnt({"messages": turns}) == ["a<|end|>\n", "b<|end|>\n"]


def test_a_prompt_with_its_completion_is_a_chat_or_plain_text() -> None:
    row = {"prompt": "2+2=", "completion": "4"}
    assert learnt(row) == ["4<|end|>\n"]
    assert learnt(row, use_template=False) == ["4<|end|>"]


def test_two_answers_in_a_row_are_both_learnt_without_what_announces_them() -> None:
    turns = [USER, ANSWER, {**ANSWER, "content": "b"}]
    assert learnt({"messages": turns}) == ["a<|end|>\n", "b<|end|>\n"]


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    rewriting = "{% for m in messages %}{% if m['role'] == 'user' or loop.last %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    with pytest.raises(DataError, match="writes a turn differently once others follow"):
        learnt({"messages": [USER, ANSWER, USER, ANSWER]}, template=rewriting)
    assert learnt({"messages": [USER, ANSWER]}, template=rewriting) == ["[a]"]


def test_what_a_template_says_against_a_chat_reaches_the_user() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="here: the chat template refuses it: roles must alternate"):
        learnt({"messages": [USER, ANSWER]}, template=strict)
    broken = "{{ messages[0]['content'] + 1 }}"
    with pytest.raises(DataError, match="here: the chat template refuses it: can only concatenate"):
        learnt({"messages": [USER, ANSWER]}, template=broken)
