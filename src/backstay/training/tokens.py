"""TokenStore: a tokenized data set in three arrays on disk, mapped into every rank and loader worker instead of copied.

Guarantees: a store under its final name is complete, and its name says what it was made from, so that a resumed run finds the same one or
notices that the data has changed.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from backstay.errors import DataError
from backstay.training.preference_samples import read_pairs
from backstay.training.samples import Sample, Text, read_samples, render

Kind = Literal["samples", "pairs"]
TooLong = Literal["truncate", "drop", "error"]
BATCH = 256
COUNTS_NAME = "counts.json"


@dataclass(frozen=True, kw_only=True)
class Tokenizing:
    """How a data set is tokenized.

    Attributes:
        seq_len: longest sample, in tokens.
        too_long: what happens to longer ones.
        use_template: whether prompts with completions go through the chat template; chats always do.
        kind: what a line of the file is; pairs are stored as two samples each, chosen and rejected.
    """

    seq_len: int
    too_long: TooLong
    use_template: bool
    kind: Kind = "samples"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What became of the samples of a file; a pair counts as two."""

    kept: int = 0
    truncated: int = 0
    dropped: int = 0
    tokens: int = 0
    learnt: int = 0
    largest_id: int = 0

    def __str__(self) -> str:
        text = f"{self.kept} samples, {self.tokens} tokens, loss on {self.learnt}"
        notes = [
            f"{count} {what}"
            for count, what in ((self.truncated, "truncated"), (self.dropped, "dropped"))
            if count
        ]
        return f"{text} ({', '.join(notes)})" if notes else text


class TokenStore:
    """Samples as token ids, and which of them the loss is taken on; of pair i, sample 2i is the chosen one and 2i+1 the rejected.

    Args:
        path: a directory that `make_store` made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts = Counts(**json.loads((path / COUNTS_NAME).read_text()))
        self._ends: npt.NDArray[np.int64] = np.load(path / "ends.npy")
        # An empty array cannot be mapped; a store without samples is refused before.
        self._ids: npt.NDArray[np.int32] = np.load(path / "ids.npy", mmap_mode="r")
        self._learnt: npt.NDArray[np.bool_] = np.load(path / "learnt.npy", mmap_mode="r")

    @property
    def name(self) -> str:
        """Says what the store was made from."""
        return self.path.name

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids of a sample, and whether the loss is taken on each."""
        start = int(self._ends[index - 1]) if index else 0
        stop = int(self._ends[index])
        return self._ids[start:stop], self._learnt[start:stop]

    def lengths(self) -> list[int]:
        """Number of tokens of each sample."""
        lengths: list[int] = np.diff(self._ends, prepend=0).tolist()
        return lengths


def hash_file(file: Path) -> str:
    """A short name for the content of a file.

    Raises:
        DataError: it cannot be read.
    """
    hashing = xxhash.xxh3_64()
    try:
        with file.open("rb") as reader:
            while piece := reader.read(1 << 20):
                hashing.update(piece)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error
    return hashing.hexdigest()


def store_name(file: Path, tokenizer_hash: str, how: Tokenizing) -> str:
    """A name for the store of a file: of its content, the tokenizer and the rules.

    Raises:
        DataError: the file cannot be read.
    """
    rules = asdict(how)
    if how.kind == "samples":  # left out, as checkpoints know these stores by names without it
        del rules["kind"]
    parts = json.dumps([hash_file(file), tokenizer_hash, rules])
    return xxhash.xxh3_64_hexdigest(parts.encode())


def make_store(
    file: Path,
    home: Path,
    *,
    tokenizer: Any,
    tokenizer_hash: str,
    how: Tokenizing,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Tokenize a JSONL file into a directory below `home`, or find it done; by one process for all.

    Args:
        on_progress: called with numbers of samples as they are done.

    Raises:
        DataError: file, line and field of what is wrong; or nothing is left to learn from.
    """
    path = home / store_name(file, tokenizer_hash, how)
    if path.exists():
        return path
    home.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{path.name}.incomplete-", dir=home))
    try:
        write_store(unfinished, encode_file(file, tokenizer, how, on_progress))
        os.rename(unfinished, path)
    except OSError:
        if not path.exists():  # else another process was as fast
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path


@dataclass(frozen=True)
class Encoded:
    """A sample in tokens, after the rules for long ones; `ids` is empty if it was dropped."""

    ids: Sequence[int]
    learnt: Sequence[bool]
    is_truncated: bool = False


def encode_file(
    file: Path, tokenizer: Any, how: Tokenizing, on_progress: Callable[[int], None]
) -> Iterator[Encoded]:
    """The samples of a file in tokens, or those of its pairs."""
    if how.kind == "pairs":
        samples = chain.from_iterable(read_pairs(file))
        return keep_pairs(encode_samples(samples, tokenizer, how, on_progress))
    return encode_samples(read_samples(file), tokenizer, how, on_progress)


def keep_pairs(samples: Iterator[Encoded]) -> Iterator[Encoded]:
    """Drop both samples of a pair if one was dropped, or if they have become the same."""
    for chosen, rejected in zip(samples, samples, strict=True):
        if len(chosen.ids) and len(rejected.ids) and chosen.ids != rejected.ids:
            yield from (chosen, rejected)
        else:
            yield from (Encoded((), ()), Encoded((), ()))


def encode_samples(
    samples: Iterable[Sample], tokenizer: Any, how: Tokenizing, on_progress: Callable[[int], None]
) -> Iterator[Encoded]:
    """Samples in tokens, a batch at a time."""
    batch: list[Sample] = []
    for sample in samples:
        check_template(sample, tokenizer, how)
        batch.append(sample)
        if len(batch) == BATCH:
            yield from encode_batch(batch, tokenizer, how)
            on_progress(len(batch))
            batch = []
    if batch:
        yield from encode_batch(batch, tokenizer, how)
        on_progress(len(batch))


def check_template(sample: Sample, tokenizer: Any, how: Tokenizing) -> None:
    """See that there is a chat template where one is needed."""
    if tokenizer.chat_template or not (sample.is_chat or how.use_template):
        return
    way_out = (
        ""
        if sample.is_chat
        else ", or set data.use_template=false to join prompt and completion as they are"
    )
    raise DataError(
        f"{sample.place}: the tokenizer of {tokenizer.name_or_path} has no chat template; "
        f"use an instruction-tuned model's tokenizer{way_out}"
    )


def encode_batch(samples: Sequence[Sample], tokenizer: Any, how: Tokenizing) -> Iterator[Encoded]:
    """Render, tokenize, and mark what is to be learnt."""
    texts = [
        render(sample, tokenizer, use_template=sample.is_chat or how.use_template)
        for sample in samples
    ]
    found = tokenizer(
        [text.text for text in texts], add_special_tokens=False, return_offsets_mapping=True
    )
    rows = zip(samples, texts, found["input_ids"], found["offset_mapping"], strict=True)
    for sample, text, ids, offsets in rows:
        yield fit(Encoded(ids, mark(text, offsets)), sample, how)


def mark(text: Text, offsets: Sequence[tuple[int, int]]) -> list[bool]:
    """Whether each token begins in a stretch to be learnt."""
    spans = iter(text.spans)
    start, stop = next(spans, (0, 0))
    learnt = []
    for begin, _ in offsets:
        while begin >= stop and (following := next(spans, None)) is not None:
            start, stop = following
        learnt.append(start <= begin < stop)
    return learnt


def fit(encoded: Encoded, sample: Sample, how: Tokenizing) -> Encoded:
    """Apply the rule for samples that are too long, and drop those with nothing to learn."""
    num_tokens = len(encoded.ids)
    is_long = num_tokens > how.seq_len
    if is_long and how.too_long == "error":
        raise DataError(
            f"{sample.place}: {num_tokens} tokens, but data.seq_len is {how.seq_len}; raise it, or set data.too_long to truncate or drop"
        )
    if is_long and how.too_long == "drop":
        return Encoded((), ())
    ids, learnt = encoded.ids[: how.seq_len], encoded.learnt[: how.seq_len]
    # The first token is never predicted.
    return Encoded(ids, learnt, is_long) if any(learnt[1:]) else Encoded((), ())


def write_store(path: Path, samples: Iterator[Encoded]) -> None:
    """Write the arrays."""
    ids, learnt, ends = [], [], []
    total, dropped, truncated = 0, 0, 0
    for sample in samples:
        if not len(sample.ids):
            dropped += 1
            continue
        ids.append(np.asarray(sample.ids, np.int32))
        learnt.append(np.asarray(sample.learnt, np.bool_))
        total += len(sample.ids)
        ends.append(total)
        truncated += sample.is_truncated
    np.save(path / "ends.npy", np.asarray(ends, np.int64))
    np.save(path / "ids.npy", np.concatenate(ids) if ids else np.empty(0, np.int32))
    all_learnt = np.concatenate(learnt) if learnt else np.empty(0, np.bool_)
    np.save(path / "learnt.npy", all_learnt)
    counts = Counts(
        kept=len(ends),
        truncated=truncated,
        dropped=dropped,
        tokens=total,
        learnt=int(all_learnt.sum()),
        largest_id=max((int(each.max()) for each in ids), default=0),
    )
    (path / COUNTS_NAME).write_text(json.dumps(asdict(counts)))
