"""A GGUF file becomes a directory that stock transformers loads: same weights, same tokens, nothing half done."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tiny_gguf import TWO_SPACES, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from backstay.errors import InvalidArgument, ModelError
from backstay.interop.gguf import convert_gguf
from backstay.testing.tiny_llm import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model that a file was written from, and the directory made from that file."""
    home = tmp_path_factory.mktemp("tiny")
    model = write_tiny_gguf(home / "tiny.gguf")
    return model, convert_gguf(home / "tiny.gguf", home / "out")


@pytest.fixture
def gguf_file(converted: tuple[Any, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    _, out = converted
    return Path(shutil.copy(out.with_name("tiny.gguf"), tmp_path))


def assert_same_weights(model: Any, path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name].float(), value), name


def test_the_weights_are_those_of_the_model_it_was_made_from(converted: tuple[Any, Path]) -> None:
    model, out = converted
    assert_same_weights(model, out)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "short.gguf", kind=Kind.BF16)
    out = convert_gguf(tmp_path / "short.gguf", tmp_path / "out")
    assert_same_weights(model, out)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0])
def test_what_bfloat16_cannot_hold_becomes_float32(kind: Kind, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", kind=kind)
    out = convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32
    assert not hasattr(loaded.config, "quantization_config")


def test_special_tokens_and_the_template_are_taken_over(converted: tuple[Any, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    ids = tokenizer("<|start|>ab<|end|>").input_ids
    assert len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_digits_are_split_off_before_the_spaces_in_front_of_them(
    converted: tuple[Any, Path],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[1])
    assert tokenizer.tokenize("a  12") == ["a", TWO_SPACES, "1", "2"]


def test_generation_knows_when_to_stop(converted: tuple[Any, Path]) -> None:
    generation = AutoModelForCausalLM.from_pretrained(converted[1]).generation_config
    assert (generation.eos_token_id, generation.pad_token_id) == (2, 0)


def test_only_the_directory_is_left(converted: tuple[Any, Path]) -> None:
    names = {path.name for path in converted[1].parent.iterdir()}
    assert names == {"tiny.gguf", "tiny.source", "out"}


def test_a_converted_directory_is_returned_as_it_is(converted: tuple[Any, Path]) -> None:
    _, out = converted
    before = (out / "model.safetensors").stat()
    assert convert_gguf(out.with_name("gone.gguf"), out) == out
    assert (out / "model.safetensors").stat() == before


def test_a_directory_of_something_else_is_left_alone(gguf_file: Path) -> None:
    other = gguf_file.with_name("other")
    other.mkdir()
    with pytest.raises(InvalidArgument, match=r"other: exists, .*config\.json"):
        convert_gguf(gguf_file, other)


def test_files_beside_it_do_not_matter(gguf_file: Path) -> None:
    (gguf_file.parent / "config.json").write_text("{}")
    (gguf_file.parent / "tokenizer.json").write_text("{}")
    out = convert_gguf(gguf_file, gguf_file.with_name("out"))
    assert len(AutoTokenizer.from_pretrained(out)("ab").input_ids) == 2


@pytest.mark.parametrize(
    ("content", "found"), [(b"PK\x03\x04 zip", r"begins with b'PK"), (b"", "is empty")]
)
def test_another_kind_of_file_is_refused(content: bytes, found: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.write_bytes(content)
    with pytest.raises(InvalidArgument, match=rf"weights\.gguf: expected a GGUF file.*{found}"):
        convert_gguf(file, tmp_path / "out")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"gone\.gguf: .*No such file"):
        convert_gguf(tmp_path / "gone.gguf", tmp_path / "out")


@pytest.mark.parametrize("num_bytes", [4, 1000, 9000, -10])
def test_a_truncated_file_leaves_nothing_behind(num_bytes: int, gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"tiny\.gguf: damaged"):
        convert_gguf(gguf_file, gguf_file.with_name("out"))
    assert [path.name for path in gguf_file.parent.iterdir()] == ["tiny.gguf"]


def test_a_file_without_some_weights_is_refused(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="abacus")
    with pytest.raises(ModelError, match="architecture abacus is not supported"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")


def test_without_the_package_it_says_what_to_install(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match="pip install gguf"):
        convert_gguf(gguf_file, gguf_file.with_name("out"))
