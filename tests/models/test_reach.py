"""How many characters a token stands for at most: never fewer than one does, and not known where nobody could."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from mlxcel_nb.errors import PromptTooLong
from mlxcel_nb.models import tokenizer as module
from mlxcel_nb.models.reach import COMPOSED, NOT_KNOWN, Reach
from mlxcel_nb.models.text import NAMES_OF_BYTES
from mlxcel_nb.models.tokenizer import LONG, Tokenizer, load_tokenizer
from tests.tiny import make_tiny

END = "<|end|>"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def in_bytes(normalizer: Any = None, *cuts: Any, without: bytes = b"") -> Library:
    """GPT-2's kind: bytes, and two merges."""
    names = [*(name for name, byte in NAMES_OF_BYTES.items() if byte not in without), "aa", "aaaa"]
    made = Library(models.BPE({name: i for i, name in enumerate(names)}, [("a", "a"), ("aa", "aa")]))
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def pieces(*more: str, cut: Any = None, normalizer: Any = None, **options: Any) -> Library:
    """SentencePiece's kind, as BPE."""
    names = ["<unk>", "▁", *"abc", "▁a", *more]
    made = Library(models.BPE({name: i for i, name in enumerate(names)}, [("▁", "a")], unk_token="<unk>", **options))
    made.normalizer = normalizer or normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if cut is not None:
        made.pre_tokenizer = cut
    return made


KNOWN = {
    "bytes": (in_bytes(), 4),
    "composed": (in_bytes(normalizers.NFC()), 4 * COMPOSED),
    "composed, of compatible ones": (in_bytes(normalizers.NFKC()), 4 * COMPOSED),
    "decomposed": (in_bytes(normalizers.NFD()), 4),
    "cut apart": (in_bytes(None, pre_tokenizers.Split(Regex(r"\s"), "isolated"), pre_tokenizers.Digits()), 4),
    "three spaces are one": (in_bytes(normalizers.Replace("   ", " ")), 12),
    "some characters are dropped": (in_bytes(without=b"\x04c1\xf1\xff"), 4),
    "pieces, else bytes": (pieces(*BYTES, byte_fallback=True, fuse_unk=True), 6),
    "pieces, else one unknown each": (pieces(fuse_unk=False), 5),
    "pieces after Metaspace": (pieces(fuse_unk=False, cut=pre_tokenizers.Metaspace()), 5),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_token_stands_for_no_more_characters_than_are_told(name: str) -> None:
    library, told = KNOWN[name]
    reach = module._reach_of(library)
    assert reach.most == told

    @given(st.text("a bc\x041é\u0301ᾇα\u0313\u0300\u0345가ㄱᄀ\u1161ﬁ🙂") | st.text())
    def holds(text: str) -> None:
        assert reach.fits(text, len(library.encode(text).ids))

    holds()


UNKNOWN = {
    "unknown ones become one": pieces(fuse_unk=True),
    "bytes are not all there": pieces(*BYTES[:-1], byte_fallback=True, fuse_unk=True),
    "unknown ones are dropped": Library(models.BPE({"a": 0}, [])),
    "parts of characters are dropped": in_bytes(without=b"\x80"),
    "what is dropped may be made of others": in_bytes(normalizers.Lowercase(), without=b"k"),
    "words": Library(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
    "a unigram": Library(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    "spaces are dropped": in_bytes(None, pre_tokenizers.WhitespaceSplit()),
    "what was cut at is dropped": in_bytes(None, pre_tokenizers.Split(" ", "removed")),
    "ends are stripped": in_bytes(normalizers.Strip()),
    "accents are dropped": in_bytes(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "runs are one": in_bytes(normalizers.Replace(Regex(" +"), " ")),
    "something is taken out": in_bytes(normalizers.Replace("a", "")),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_a_token_may_stand_for_any_number_none_is_told(name: str) -> None:
    assert module._reach_of(UNKNOWN[name]) == NOT_KNOWN
    assert NOT_KNOWN.fits("a" * 1000, 1)


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_a_token_that_takes_the_space_beside_it_has_no_bound(side: str) -> None:
    library = in_bytes()
    library.add_special_tokens([AddedToken("<|user|>", **{side: True})])
    assert module._reach_of(library) == NOT_KNOWN
    spaces = " " * 1000
    assert len(library.encode(f"{spaces}<|user|>{spaces}").ids) <= 1001, "or this test means nothing"


def test_no_character_decomposes_into_more_than_are_composed_into_one() -> None:
    every = (chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000)
    assert max(len(unicodedata.normalize("NFD", char)) for char in every) == COMPOSED


@pytest.fixture
def tiny(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(make_tiny(tmp_path))


def test_the_longest_text_that_can_fit_is_read_and_a_longer_one_is_not(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = END * 10_000
    assert len(fits) > LONG and len(tiny.encode(fits, context=10_000)) == 10_000
    monkeypatch.setattr(tiny._backend, "encode", lambda *_: pytest.fail("it was read"))
    with pytest.raises(PromptTooLong) as caught:
        tiny.encode(fits + "a", context=10_000)
    assert str(caught.value) == (
        "the prompt has 70001 characters, the model's context of 10000 tokens holds 70000 at most. Shorten it."
    )
    with pytest.raises(PromptTooLong, match=r"has 70017 characters"):
        tiny.chat_prompt([{"role": "user", "content": fits}], context=10_000)


def test_a_text_is_read_where_the_context_or_what_a_token_holds_is_not_known(
    tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a" * (LONG + 1)
    assert len(tiny.encode(text, context=0)) == len(text)
    monkeypatch.setattr(tiny._backend, "reach", lambda: NOT_KNOWN)
    assert len(tiny.encode(text, context=10)) == len(text)


def test_a_short_text_is_read_whatever_the_context_is(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a token holds is asked for where it saves something."""
    monkeypatch.setattr(tiny._backend, "reach", lambda: pytest.fail("the vocabulary was looked at"))
    assert len(tiny.encode("a" * 1000, context=10)) == 1000


def test_the_real_tokenizer_has_a_bound(smollm2: Path) -> None:
    reach = load_tokenizer(smollm2)._reach
    assert reach == Reach(81, "\x04\x06\x13\x14\x16\x1d"), "it drops some control characters"
    assert reach.fits("\x04" * 1000 + "a" * 81, 1) and not reach.fits("\x04" * 1000 + "a" * 82, 1)
