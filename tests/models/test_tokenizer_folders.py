"""Tokenizers of ordinary model folders give transformers' ids, whatever files they are kept in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.errors import ModelError, RequestError
from mlxcel_nb.models.constraints import Constraints
from mlxcel_nb.models.gguf_tokenizer import tokenizer_files
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.models.tokenizer import load_tokenizer
from tests.models.gguf_files import metadata_file, sentencepieces, write_gguf
from tests.tiny import make_tiny

TEXTS = ["the cat", "", " two  spaces", "<s>in</s>", "<extra>x<extra>", "é🙂"]


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes one away."""
    data = json.loads(file.read_text()) if file.exists() else {}
    data.update(changes)
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"extra_special_tokens": ["<extra>"]},
        {"pad_token": "<extra>"},
        {"added_tokens_decoder": {"300": {"content": "<extra>", "special": True, "normalized": False}}},
        {"added_tokens_decoder": {"300": {"content": "<extra>", "special": False, "lstrip": True}}},
        {"bos_token": {"content": "</s>", "lstrip": False, "special": True}, "add_bos_token": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("post_processor", [True, False], ids=["adds bos itself", "adds nothing itself"])
def test_what_tokenizer_config_adds_is_added(tmp_path: Path, changes: dict[str, Any], post_processor: bool) -> None:
    from transformers import AutoTokenizer

    from mlxcel_nb.models.gguf import convert

    write_gguf(tmp_path / "tiny.gguf", tokenizer={"add_bos": post_processor})
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder, precision="kept")
    edit(folder / "tokenizer_config.json", **changes)
    theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ours = load_tokenizer(folder)
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        for special in (True, False):
            want = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == want, (text, special)
            assert ours.decode(want) == theirs.decode(want, clean_up_tokenization_spaces=False)
            assert ours.decode(want, skip_special=True) == theirs.decode(want, skip_special_tokens=True)


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    letters = ["<unk>", "</s>", *"abcdefgh", "Ġ", "ab"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(letters)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("abc cab")) == "abc cab"
    assert tokenizer.decode([10**6]) == ""
    assert 1 in tokenizer.eos_ids
    mask = Constraints(lambda: tokenizer).begin(SamplingParams(regex="ab c")).mask(tokenizer.vocab_size)
    assert [token for token, may in enumerate(mask) if may] == tokenizer.encode("ab c")[:1]


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}'], ids=["empty", "not JSON", "no model"])
def test_a_damaged_tokenizer_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    make_tiny(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_folder_without_any_tokenizer_says_so(tmp_path: Path) -> None:
    make_tiny(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_lone_surrogate_is_refused_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="surrogate at position 2"):
        load_tokenizer(make_tiny(tmp_path)).encode("ab\ud800")


def test_ends_of_an_answer_come_from_every_file_that_names_them(tmp_path: Path) -> None:
    make_tiny(tmp_path, eos_token_id=7)
    edit(tmp_path / "generation_config.json", eos_token_id=[8, 9])
    assert load_tokenizer(tmp_path).eos_ids >= {7, 8, 9}
    edit(tmp_path / "config.json", eos_token_id=None, text_config={"eos_token_id": 11})
    edit(tmp_path / "generation_config.json", eos_token_id=None)
    assert 11 in load_tokenizer(tmp_path).eos_ids


def test_neither_transformers_nor_mlx_is_imported(smollm2: Path) -> None:
    code = (
        "import sys; from mlxcel_nb.models.tokenizer import load_tokenizer; from mlxcel_nb.models import store, info;"
        f"load_tokenizer({str(smollm2)!r}).chat_prompt([{{'role': 'user', 'content': 'hi'}}]);"
        f"info.model_info({str(smollm2)!r}); store.list_models();"
        "print([name for name in ('transformers', 'mlx', 'mlx_lm', 'numpy', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_sentencepiece_vocabulary_gives_sentencepieces_ids(tmp_path: Path) -> None:
    ours, theirs = sentencepieces(tmp_path)
    for text in ["the quick fox", "quickly  boxed ", " the", "dozens of 🙂 é foxes\nand\tdogs", "overlazy", "12 pack"]:
        ids_of_text = theirs.encode(text)
        assert ours.encode(text, add_special=False) == ids_of_text
        assert ours.encode(text) == [theirs.bos_id(), *ids_of_text]
        assert ours.decode(ids_of_text) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 2024\n\n x", ["it", "'s", "Ġ2024", "ĊĊ", "Ġx"]),
        ("smollm", "it's 2024", ["it", "'s", "Ġ", "2", "0", "2", "4"]),
        ("llama-bpe", "IT'S 20245?!\n\n x", ["IT", "'S", "Ġ", "202", "45", "?!ĊĊ", "Ġx"]),
        ("qwen2", "it's 2024", ["it", "'s", "Ġ", "2", "0", "2", "4"]),
        ("tekken", "helloWorld 12/\n", ["hello", "World", "Ġ", "1", "2", "/Ċ"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre: str, text: str, words: list[str]) -> None:
    from tokenizers import Tokenizer

    file = metadata_file(**{"ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": ["a"], "ggml.merges": []})
    library = Tokenizer.from_str(json.dumps(tokenizer_files(file)["tokenizer.json"]))
    assert library.pre_tokenizer is not None
    assert [word for word, _ in library.pre_tokenizer.pre_tokenize_str(text)] == words
