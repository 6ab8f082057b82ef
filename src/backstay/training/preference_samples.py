"""Preferences as users write them: JSONL files of prompts with a chosen and a rejected answer.

Pure but for reading files. A pair becomes two samples that begin alike; only what follows their shared prompt is learnt.
"""

from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from backstay.errors import DataError
from backstay.training.samples import (
    Sample,
    check_text,
    check_turns,
    describe,
    parse_object,
    read_lines,
)

PAIR_FORMS = (
    "'prompt', 'chosen' and 'rejected' (each a text or a list of {'role': ..., 'content': ...}), "
    "or 'chosen' and 'rejected' alone (two lists that begin with the same messages)"
)
Messages = tuple[Mapping[str, str], ...]
Pair = tuple[Sample, Sample]


def read_pairs(file: Path) -> Iterator[Pair]:
    """The chosen and the rejected sample of each line of a JSONL file; blank lines are passed over.

    Raises:
        DataError: file, line and field of what is wrong.
    """
    for line, place in read_lines(file):
        yield parse_pair(line, place)


def parse_pair(line: str, place: str) -> Pair:
    """One line.

    Raises:
        DataError: it is no pair of answers to one prompt.
    """
    row = parse_object(line, place, forms=PAIR_FORMS)
    if not ("chosen" in row and "rejected" in row):
        raise DataError(f"{place}: expected {PAIR_FORMS}; found the fields {sorted(row)}")
    fields = [
        check_turns_or_text(row[name], f"{place}, field '{name}'", role="assistant")
        for name in ("chosen", "rejected")
    ]
    if fields[0] == fields[1]:
        raise DataError(
            f"{place}: 'chosen' and 'rejected' are the same, so nothing is preferred; remove the line"
        )
    if row.get("prompt") is None:
        prompt = shared_prompt(row, place, *fields)
    else:
        prompt = check_turns_or_text(row["prompt"], f"{place}, field 'prompt'", role="user")
    # As three texts it is the sft recipe's prompt with a completion, twice.
    is_chat = not all(isinstance(row.get(name), str) for name in ("prompt", "chosen", "rejected"))
    answers = [
        take_answer(field, prompt, f"{place}, field '{name}'")
        for name, field in zip(("chosen", "rejected"), fields, strict=True)
    ]
    if answers[0] == answers[1]:
        raise DataError(
            f"{place}: 'chosen' and 'rejected' answer the same, so nothing is preferred; remove the line"
        )
    chosen, rejected = (
        Sample(place, prompt + answer, is_chat, learnt_from=len(prompt)) for answer in answers
    )
    return chosen, rejected


def check_turns_or_text(value: Any, where: str, *, role: str) -> Messages:
    """A field as messages; a text is one message of that role."""
    if isinstance(value, list):
        return check_turns(value, where)
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a text or a list of messages, found {describe(value)}")
    return ({"role": role, "content": check_text(value, where)},)


def shared_prompt(
    row: Mapping[str, Any], place: str, chosen: Messages, rejected: Messages
) -> Messages:
    """The messages that two conversations begin with."""
    if isinstance(row["chosen"], str) or isinstance(row["rejected"], str):
        raise DataError(
            f"{place}, field 'prompt': missing, but texts need one; expected {PAIR_FORMS}"
        )
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    prompt = tuple(message for message, _ in alike)
    if not prompt:
        raise DataError(
            f"{place}: 'chosen' and 'rejected' begin with different messages, so they answer no common prompt; expected {PAIR_FORMS}"
        )
    return prompt


def take_answer(messages: Messages, prompt: Messages, where: str) -> Messages:
    """What follows the prompt, which may be repeated in front of it."""
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if not messages:
        raise DataError(f"{where}: nothing follows the prompt; expected an answer of the assistant")
    if messages[0]["role"] != "assistant":
        roles = [message["role"] for message in messages]
        raise DataError(
            f"{where}: expected an answer with role 'assistant' after the prompt, found {roles}"
        )
    return messages
