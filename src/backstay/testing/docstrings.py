"""Functions of Python's standard library and what their docstrings say: a real data set for fine-tuning that needs no download.

    python -m backstay.testing.docstrings OUT

The source is read, never imported, so it differs a little from one Python version to the next; for one version it is always the same.
"""

import argparse
import ast
import hashlib
import inspect
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = "Write the docstring of this Python function:"
MIN_LINES, MAX_LINES = 3, 40
MIN_DOCSTRING_CHARS, MAX_DOCSTRING_CHARS = 20, 300
MIN_WORDS = 3
# Examples, and signatures.
NOT_PROSE = (">>>", "->")
# Of ten samples, one is held out.
HELD_OUT_OF = 10
PASSED_OVER = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "site-packages",
        "dist-packages",
        "_bundled",
    }
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Docstrings:
    """The data set on disk: JSONL files of chats.

    Attributes:
        train, heldout: a sample per line, {"messages": [user, assistant], "id": "module.function"}.
    """

    train: Path
    heldout: Path
    num_train: int
    num_heldout: int


@dataclass(frozen=True)
class Documented:
    """A function and its description.

    Attributes:
        name: with module and class.
        source: without the docstring.
        summary: the docstring's first paragraph, on one line.
    """

    name: str
    source: str
    summary: str

    @property
    def digest(self) -> bytes:
        """Decides about order and split: by it, any first samples are from all over the library."""
        return hashlib.sha256(self.name.encode()).digest()

    @property
    def is_held_out(self) -> bool:
        # By the last bytes, because the first ones give the order: few samples are split like all.
        return int.from_bytes(self.digest[-8:]) % HELD_OUT_OF == 0

    @property
    def prompt(self) -> str:
        return f"{INSTRUCTION}\n\n{self.source}"

    def line(self) -> str:
        """As a sample."""
        messages = [
            {"role": "user", "content": self.prompt},
            {"role": "assistant", "content": self.summary},
        ]
        return json.dumps({"messages": messages, "id": self.name}, ensure_ascii=False) + "\n"


def write_docstrings(
    out: Path, *, max_prompt_chars: int = 2000, limit: int | None = None
) -> Docstrings:
    """Write `train.jsonl` and `heldout.jsonl` into a directory; each appears at once, when it is complete.

    Args:
        max_prompt_chars: passes over functions with a longer prompt, which is the instruction and the source.
        limit: at most so many samples, in both files together.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = distinct(walk_library(library))
    chosen = [sample for sample in found if len(sample.prompt) <= max_prompt_chars][:limit]
    train = [sample.line() for sample in chosen if not sample.is_held_out]
    heldout = [sample.line() for sample in chosen if sample.is_held_out]
    out.mkdir(parents=True, exist_ok=True)
    return Docstrings(
        train=write_lines(out / "train.jsonl", train),
        heldout=write_lines(out / "heldout.jsonl", heldout),
        num_train=len(train),
        num_heldout=len(heldout),
    )


def distinct(samples: Iterable[Documented]) -> list[Documented]:
    """Each name, source and summary once, in the order of digests: nothing held out is in the training data as well."""
    seen: set[str] = set()
    kept = []
    for sample in sorted(samples, key=lambda sample: (sample.digest, sample.source)):
        texts = {
            f"name {sample.name}",
            f"source {sample.source}",
            f"summary {sample.summary.lower()}",
        }
        if seen.isdisjoint(texts):
            kept.append(sample)
        seen |= texts
    return kept


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    """Write a text file in one step."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text("".join(lines), encoding="utf-8")
    return unfinished.replace(path)


def walk_library(library: Path) -> Iterator[Documented]:
    """All documented functions below a directory of modules."""
    for home, directories, files in os.walk(library):
        directories[:] = [name for name in directories if name not in PASSED_OVER]
        for file in files:
            if file.endswith(".py"):
                path = Path(home, file)
                yield from read_module(path, module_name(path.relative_to(library)))


def module_name(path: Path) -> str:
    """As it is imported."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def read_module(path: Path, module: str) -> Iterator[Documented]:
    """The documented functions of a file that are fit for the data set; of a file in another Python's syntax, none."""
    try:
        with tokenize.open(path) as file:
            source = file.read()
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return
    # Only at \n, as the parser counts lines: `splitlines` would also break at form feeds.
    lines = source.split("\n")
    for name, node in functions(tree, module):
        text = source_without_docstring(node, lines)
        summary = first_paragraph(ast.get_docstring(node, clean=False) or "")
        if text is not None and is_fit(text, summary):
            yield Documented(name, text, summary)


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Functions and methods with their full names, however deep."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}.{child.name}"
            if isinstance(child, Function):
                yield name, child
            yield from functions(child, name)
        else:
            yield from functions(child, prefix)


def source_without_docstring(node: Function, lines: list[str]) -> str | None:
    """A function as it is written, comments and all, moved to the left margin.

    Returns:
        None if there is no docstring, nothing besides it, or it shares a line with code.
    """
    docstring = node.body[0]
    if ast.get_docstring(node, clean=False) is None or len(node.body) == 1:
        return None
    assert docstring.end_lineno is not None, "the parser gives ends"
    assert node.end_lineno is not None, "the parser gives ends"
    before = lines[docstring.lineno - 1].encode()[: docstring.col_offset]
    behind = lines[docstring.end_lineno - 1].encode()[docstring.end_col_offset :].strip()
    if before.strip() or (behind and not behind.startswith(b"#")):
        return None
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    head = lines[start - 1 : docstring.lineno - 1]
    body = lines[docstring.end_lineno : node.end_lineno]
    while not body[0].strip():
        del body[0]
    return "\n".join(move_left(line, node.col_offset) for line in [*head, *body])


def move_left(line: str, num_columns: int) -> str:
    """Without so much indentation; a line that has less is the inside of a string, and stays."""
    return line[num_columns:].rstrip() if not line[:num_columns].strip() else line


def first_paragraph(docstring: str) -> str:
    """What comes before the first blank line, on one line."""
    return " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())


def is_fit(source: str, summary: str) -> bool:
    """Whether a function is of a size to learn from, and described in prose."""
    return (
        MIN_LINES <= source.count("\n") + 1 <= MAX_LINES
        and MIN_DOCSTRING_CHARS <= len(summary) <= MAX_DOCSTRING_CHARS
        and len(summary.split()) >= MIN_WORDS
        and not any(sign in summary for sign in NOT_PROSE)
    )


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(
        prog="python -m backstay.testing.docstrings",
        description="Write the standard library's functions and the first paragraphs of their docstrings as chats: OUT/train.jsonl and, for evaluation, OUT/heldout.jsonl.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="directory for the two files")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="at most N samples in both files together (default: all)",
    )
    parser.add_argument(
        "--max-prompt-chars",
        type=int,
        default=2000,
        metavar="N",
        help="pass over functions that make a longer prompt (default: %(default)s)",
    )
    given = parser.parse_args()
    made = write_docstrings(given.out, max_prompt_chars=given.max_prompt_chars, limit=given.limit)
    print(f"{made.num_train} samples in {made.train}, {made.num_heldout} in {made.heldout}")


if __name__ == "__main__":
    main()
