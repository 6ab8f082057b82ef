"""Samples as users write them: JSONL files of chats or of prompts with completions, and how a chat template turns one into text.

Pure but for reading files. Which characters the loss is taken on is decided here, on the text; tokens come later.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from backstay.errors import DataError

FORMS = (
    "'messages' (a list of {'role': ..., 'content': ...}), or 'prompt' and 'completion' (two texts)"
)


@dataclass(frozen=True)
class Sample:
    """One line of a data set.

    Attributes:
        place: file and line, for messages.
        messages: a chat; a prompt with its completion is one of two messages.
        is_chat: whether it was written as a chat.
        learnt_from: number of the first message that may be learnt.
    """

    place: str
    messages: tuple[Mapping[str, str], ...]
    is_chat: bool
    learnt_from: int = 0


@dataclass(frozen=True)
class Text:
    """A rendered sample.

    Attributes:
        text: all of it, special tokens written out.
        spans: the stretches of characters to be learnt, in order.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


def read_samples(file: Path) -> Iterator[Sample]:
    """The samples of a JSONL file; blank lines are passed over.

    Raises:
        DataError: file, line and field of what is wrong.
    """
    for line, place in read_lines(file):
        yield parse_sample(line, place)


def read_lines(file: Path) -> Iterator[tuple[str, str]]:
    """The lines of a JSONL file that are not blank, each with its place for messages.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        # Some editors put a byte order mark in front.
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield line, f"{file}, line {number}"
    except FileNotFoundError:
        raise DataError(f"{file}: no such file; expected JSONL, one sample per line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as UTF-8 text: {error}") from error


def parse_sample(line: str, place: str) -> Sample:
    """One line.

    Raises:
        DataError: it is not a sample.
    """
    row = parse_object(line, place, forms=FORMS)
    if "messages" in row:
        return Sample(place, check_messages(row["messages"], place), True)
    if "prompt" in row or "completion" in row:
        texts = [
            check_text(row.get(name), f"{place}, field '{name}'")
            for name in ("prompt", "completion")
        ]
        roles = ("user", "assistant")
        pair = tuple(
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
        )
        return Sample(place, pair, False)
    raise DataError(f"{place}: expected {FORMS}; found the fields {sorted(row)}")


def parse_object(line: str, place: str, *, forms: str) -> dict[str, Any]:
    """A line as an object.

    Args:
        forms: what is expected in it, for messages.

    Raises:
        DataError: it is none.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}); expected an object with {forms}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected an object with {forms}, found a {type(row).__name__}")
    return row


def check_messages(messages: Any, place: str) -> tuple[Mapping[str, str], ...]:
    """A chat with something to learn from."""
    where = f"{place}, field 'messages'"
    checked = check_turns(messages, where)
    check_answer(checked, where)
    return checked


def check_turns(messages: Any, where: str) -> tuple[Mapping[str, str], ...]:
    """Messages, at least one."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: expected a list of messages, found {describe(messages)}")
    for number, message in enumerate(messages):
        here = f"{where}[{number}]"
        if not isinstance(message, dict):
            raise DataError(
                f"{here}: expected {{'role': ..., 'content': ...}}, found {describe(message)}"
            )
        for name in ("role", "content"):
            check_text(message.get(name), f"{here}.{name}")
    return tuple(messages)


def check_answer(messages: Sequence[Mapping[str, str]], where: str) -> None:
    """See that the assistant says something."""
    if not any(message["role"] == "assistant" for message in messages):
        roles = [message["role"] for message in messages]
        raise DataError(
            f"{where}: no message with role 'assistant', so nothing to learn; found {roles}"
        )


def check_text(value: Any, where: str) -> str:
    """A text that can be tokenized."""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a text, found {describe(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {value[error.start : error.end]!r} at character {error.start} is half of a surrogate pair, not a character"
        ) from error
    return value


def describe(value: Any) -> str:
    """What was found, in a few words."""
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return f"a {type(value).__name__} ({text[:40]}{'...' if len(text) > 40 else ''})"


def render(sample: Sample, tokenizer: Any, *, use_template: bool) -> Text:
    """A sample as one text; what the assistant says, with the token that ends it, is to be learnt.

    Args:
        use_template: False writes a prompt and its completion one after the other, and the end-of-sequence token.

    Raises:
        DataError: the template refuses the chat, or rewrites earlier turns so that they cannot be told apart.
    """
    if not use_template:
        prompt, completion = (message["content"] for message in sample.messages)
        text = f"{prompt}{completion}{tokenizer.eos_token or ''}"
        return Text(text, ((len(prompt), len(text)),))
    try:
        return render_chat(sample, tokenizer)
    except (TemplateError, TypeError) as error:  # an operator in it met a value that is not there
        raise DataError(f"{sample.place}: the chat template refuses it: {error}") from error


def render_chat(sample: Sample, tokenizer: Any) -> Text:
    """A chat through the tokenizer's template."""
    whole = apply_template(tokenizer, sample.messages)
    spans = []
    for number, message in enumerate(sample.messages):
        if message["role"] != "assistant" or number < sample.learnt_from:
            continue
        before = apply_template(tokenizer, sample.messages[:number], prompt=True) if number else ""
        after = apply_template(tokenizer, sample.messages[: number + 1])
        if not after.startswith(before) or not whole.startswith(after.rstrip()):
            raise DataError(
                f"{sample.place}: message {number}: the chat template writes a turn differently once others follow it, so the loss "
                "cannot be limited to it. Give one sample per assistant turn, or the tokenizer another chat template"
            )
        spans.append((len(before), min(len(after), len(whole))))
    return Text(whole, tuple(spans))


def apply_template(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, prompt: bool = False
) -> str:
    """Messages as text."""
    return str(
        tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    )
