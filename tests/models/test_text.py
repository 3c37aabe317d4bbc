"""Deltas joined are the whole decoding, characters arrive whole, and nothing of a stop string is ever shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.models.text import Detokenizer, StopStrings, named_bytes
from mlxcel_nb.models.tokenizer import load_tokenizer

FAMILY = "🙂 汉字 é 👩‍👩‍👧"


class Bytes:
    """A tokenizer whose ids are bytes; 256 is special and has no text. Counts the ids it was given."""

    def __init__(self) -> None:
        self.seen = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.seen += len(ids)
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


class Words:
    """Words with a space before each but the first of a decoding, as sentence-piece tokenizers give them."""

    words = ("Hello", "there", ",", "é", "🙂")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in ids)


def deltas(ids: Sequence[int], tokenizer: object = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer or Bytes())  # type: ignore[arg-type]
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


def test_characters_of_several_ids_arrive_whole() -> None:
    """Case 16."""
    found = deltas(list(FAMILY.encode()))
    assert "".join(found) == FAMILY
    assert not any("\ufffd" in delta for delta in found)
    assert found[:4] == ["", "", "", "🙂"]


def test_a_character_cut_by_the_end_is_flushed_once() -> None:
    """Case 16."""
    ids = list("né".encode())[:-1]
    detokenizer = Detokenizer(Bytes())
    assert [detokenizer.add(i) for i in ids] == ["n", ""]
    assert detokenizer.flush() == Bytes().decode(ids)[1:] == "\ufffd"
    assert detokenizer.flush() == ""


def test_flushing_a_whole_text_adds_nothing() -> None:
    assert deltas(list(b"abc")) == ["a", "b", "c", ""]


def test_a_special_id_within_a_character_or_between_does_not_hurt() -> None:
    ids = [*b"a", 256, *"é".encode(), 256, 256, *b"b"]
    assert "".join(deltas(ids)) == "aéb"


def test_spaces_that_depend_on_neighbours_are_kept() -> None:
    ids = [0, 1, 2, 3, 4, 0]
    assert "".join(deltas(ids, Words())) == Words().decode(ids)


@given(st.text(max_size=60))
def test_any_text_byte_by_byte_is_the_same_text(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    assert "".join(deltas(list(data))) == data.decode()


def test_garbage_is_let_through_and_decoding_stays_linear() -> None:
    tokenizer = Bytes()
    joined = "".join(deltas([0x80] * 500, tokenizer))
    assert joined == "\ufffd" * 500
    assert tokenizer.seen < 500 * 60


def test_many_ids_without_text_stay_linear() -> None:
    tokenizer = Bytes()
    assert "".join(deltas([256] * 2000 + [65], tokenizer)) == "A"
    assert tokenizer.seen < 2000 * 200


def cut(text: str, size: int, stops: Sequence[str]) -> tuple[str, str | None]:
    """What a reader sees of `text` when it comes in deltas of `size` characters."""
    stopper = StopStrings(stops)
    shown, matched = "", None
    for at in range(0, len(text), size):
        piece, matched = stopper.feed(text[at : at + size])
        shown += piece
        if matched is not None:
            break
    return shown + stopper.flush(), matched


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_the_first_stop_cuts_wherever_tokens_begin(size: int) -> None:
    """Case 18."""
    stops = ["\n\n", "</answer>"]
    assert cut("one</answer>two\n\nthree", size, stops) == ("one", "</answer>")
    assert cut("one\ntwo\n\nthree</answer>", size, stops) == ("one\ntwo", "\n\n")
    assert cut("one </answ", size, stops) == ("one </answ", None)
    assert cut("</answer>", size, stops) == ("", "</answer>")
    assert cut("no stop at all\n", size, stops) == ("no stop at all\n", None)


def test_only_what_may_become_a_stop_is_held_back() -> None:
    stopper = StopStrings(["</answer>"])
    assert stopper.feed("text <") == ("text ", None)
    assert stopper.feed("b") == ("<b", None)
    assert stopper.feed("</ans") == ("", None)
    assert stopper.feed("</answer> more") == ("</ans", "</answer>")
    assert stopper.feed("and more") == ("", "</answer>")
    assert stopper.flush() == ""


def test_no_stop_begins_in_text_that_is_to_come_anyway() -> None:
    """Case 18."""
    stopper = StopStrings(["ab"])
    assert stopper.feed("xab a", armed=False) == ("xab a", None)
    assert stopper.feed("b") == ("b", None)
    assert stopper.feed("a") == ("", None)
    assert stopper.feed("c", armed=False) == ("ac", None)
    assert stopper.feed("ab") == ("", "ab")


def test_without_stops_nothing_is_held_back() -> None:
    stopper = StopStrings([])
    assert stopper.feed("anything") == ("anything", None)
    assert stopper.flush() == ""


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_the_result_does_not_depend_on_where_deltas_end(text: str, stops: list[str], data: st.DataObject) -> None:
    expected = cut(text, 1, stops)
    stopper, shown, matched, rest = StopStrings(stops), "", None, text
    while rest and matched is None:
        size = data.draw(st.integers(1, len(rest)))
        piece, matched = stopper.feed(rest[:size])
        rest = rest[size:]
        shown += piece
    assert (shown + stopper.flush(), matched) == expected
    if matched is None:
        assert shown + "" == expected[0][: len(shown)]
        assert not any(stop in text for stop in stops)


def test_the_real_tokenizer_s_ids_one_by_one_join_to_the_whole(smollm2: Path) -> None:
    """Case 16."""
    tokenizer = load_tokenizer(smollm2)
    text = f"{FAMILY} 12345  tabs\tand\n\nlines, naïve café"
    ids = list(tokenizer.encode(text))
    found = deltas(ids, tokenizer)
    assert "".join(found) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in delta for delta in found)
    for cut_at in range(len(ids)):
        assert "".join(deltas(ids[:cut_at], tokenizer)) == tokenizer.decode(ids[:cut_at])


def test_names_of_tokens_spell_bytes_or_do_not() -> None:
    assert named_bytes("<0xF0>") == b"\xf0"
    assert named_bytes("Ġhi") == b" hi"
    assert named_bytes("ðŁĻĤ") == "🙂".encode()
    assert named_bytes("") is None and named_bytes("▁a") is None


def test_every_byte_has_a_name_of_its_own_in_the_real_tokenizer(smollm2: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    ids = tokenizer.encode("🙂 é", add_special=False)
    assert b"".join(tokenizer.bytes_of(each) or b"" for each in ids) == "🙂 é".encode()
    assert tokenizer.bytes_of(10**9) is None
