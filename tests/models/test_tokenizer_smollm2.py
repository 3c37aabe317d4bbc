"""The converted tokenizer of the real model: the file's own vocabulary and merges, and the ids they imply."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_nb.models.tokenizer import LONG, Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "   ",
    "The quick brown fox jumps over the lazy dog.",
    "In 1999, 3.14159 and 1,234,567 met 42nd at 00:07.",
    "🙂 汉字 é 👩‍👩‍👧",
    "naïve café Ångström — “quotes” … ½ ² ٣ १२",
    "한국어와 日本語とไทย và tiếng Việt",
    "line one\nline two\r\n\n\ttabbed\t\tend\n\n\n",
    "def f(x):\n    return x**2  # 12 spaces            \n",
    "it's we'll I'd they've IT'S you'Re",
    "<|im_start|>user\nHi<|im_end|>\n",
    "almost <|im_start| > and <|im_end|",
    "<repo_name>a<file_sep>b<|endoftext|>",
    "\x00\x01\x7f\u00ad\u200b\ufeff\ufffd",
    "Ġ ġ Ċ are letters here",
    "a" * 300,
    " x" * 200,
]


@pytest.fixture(scope="module")
def file_fields(real_gguf: Path) -> dict[str, list]:
    """The tokenizer's fields of the GGUF file, as the gguf package reads them."""
    fields = GGUFReader(real_gguf).fields
    return {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges", "token_type")}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


class SecondBpe:
    """Byte-level BPE as its paper tells it, straight from the file's lists: the lowest-ranked pair merges first."""

    WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, tokens: list[str], merges: list[str], types: list[int]) -> None:
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        special = [token for token, kind in zip(tokens, types, strict=True) if kind == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, sorted(special, key=len, reverse=True))) + ")")
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        self.byte = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        found = []
        for i, piece in enumerate(self.special.split(text)):
            if i % 2:
                found.append(self.ids[piece])
                continue
            for part in regex.split(r"(\p{N})", piece):
                for word in self.WORDS.findall(part):
                    found += self.merge(word)
        return found

    def knows(self, char: str) -> bool:
        return all(self.byte[byte] in self.ids for byte in char.encode())

    @cache  # noqa: B019 - lives as long as the module's tests
    def merge(self, word: str) -> tuple[int, ...]:
        parts = [char for char in map(self.byte.__getitem__, word.encode()) if char in self.ids]
        while len(parts) > 1:
            pairs = [(self.ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(parts))]
            rank, i = min(pairs)
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return tuple(self.ids[part] for part in parts)


@pytest.fixture(scope="module")
def second(file_fields: dict[str, list]) -> SecondBpe:
    return SecondBpe(file_fields["tokens"], file_fields["merges"], file_fields["token_type"])


def test_the_vocabulary_and_merges_are_the_files(smollm2: Path, file_fields: dict[str, list]) -> None:
    written = json.loads((smollm2 / "tokenizer.json").read_bytes())
    assert written["model"]["vocab"] == {token: i for i, token in enumerate(file_fields["tokens"])}
    assert written["model"]["merges"] == [merge.split(" ") for merge in file_fields["merges"]]
    special = {i for i, kind in enumerate(file_fields["token_type"]) if kind == 3}
    assert {token["id"] for token in written["added_tokens"] if token["special"]} == special


def test_the_library_holds_every_token_under_its_id(tokenizer: Tokenizer, file_fields: dict[str, list]) -> None:
    assert tokenizer.vocab_size == len(file_fields["tokens"]) == 49152
    known = tokenizer._backend.token_to_id
    assert [known(token) for token in file_fields["tokens"]] == list(range(49152))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_are_those_of_a_second_implementation(tokenizer: Tokenizer, second: SecondBpe, text: str) -> None:
    assert tokenizer.encode(text) == second.encode(text)


@settings(max_examples=300)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=40))
def test_any_text_has_the_second_implementations_ids(tokenizer: Tokenizer, second: SecondBpe, text: str) -> None:
    assert tokenizer.encode(text) == second.encode(text)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_comes_back_as_it_went_in(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=300)
@given(text=st.text(max_size=60))
def test_any_text_of_known_bytes_comes_back(tokenizer: Tokenizer, second: SecondBpe, text: str) -> None:
    known = "".join(char for char in text if second.knows(char))
    assert tokenizer.decode(tokenizer.encode(known)) == known


def test_bytes_that_the_vocabulary_lacks_are_control_characters_and_vanish(
    tokenizer: Tokenizer, second: SecondBpe
) -> None:
    unknown = [chr(byte) for byte in range(128) if not second.knows(chr(byte))]
    assert unknown
    assert all(ord(char) < 32 and char not in "\t\n\r" for char in unknown)
    assert tokenizer.decode(tokenizer.encode("a" + "".join(unknown) + "b")) == "ab"


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("2024 1234567")
    assert [tokenizer.decode([i]) for i in ids] == [*"2024", " ", *"1234567"]


def test_special_tokens_are_one_id_as_text_and_can_be_left_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>user<|im_end|>") == [1, *tokenizer.encode("user"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("user"), 2], skip_special=True) == "user"


def test_every_single_id_decodes_and_ids_beyond_the_vocabulary_are_no_text(tokenizer: Tokenizer) -> None:
    assert all(isinstance(tokenizer.decode([i]), str) for i in range(0, 49152, 37))
    assert tokenizer.decode([49152, 10**9, -1]) == ""


def test_an_answer_ends_at_the_end_of_a_turn_or_of_the_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.decode([0]) == "<|endoftext|>"
    assert tokenizer.decode([2]) == "<|im_end|>"
    assert tokenizer.bos_id == 1


def test_ids_and_chat_prompts_are_transformers_own(smollm2: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2, local_files_only=True)
    for text in TEXTS:
        for special in (True, False):
            assert tokenizer.encode(text, special) == theirs.encode(text, add_special_tokens=special)
    chats = [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}],
    ]
    for chat in chats:
        for prompt in (True, False):
            want = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert tokenizer.chat_prompt(chat, add_generation_prompt=prompt) == want


def test_a_very_long_text_is_read_as_any_other_and_lets_other_threads_run(tokenizer: Tokenizer) -> None:
    """A server took one of several MB; its heartbeats stood still, and its engine was taken for dead."""
    text = "The quick brown fox, " * (20 * LONG // 21)
    with ThreadPoolExecutor(1) as pool:
        reading, turns = pool.submit(tokenizer.encode, text), 0
        while not reading.done():
            wait([reading], timeout=0.001)
            turns += 1
    ids = reading.result()
    assert turns > 20
    assert ids[:1000] == tokenizer.encode(text[: LONG // 4])[:1000]
    assert tokenizer.decode(ids) == text
