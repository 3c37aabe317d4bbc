"""Whether nodes have the same model is judged by the hashes of its files, and who differs is told with both."""

from __future__ import annotations

import pytest

from mlxcel_nb.client import sameness
from mlxcel_nb.client.sameness import difference
from mlxcel_nb.errors import WireError

GOOD = {"config.json": "c" * 64, "model.safetensors": "0123456789abcdef" * 4}


def test_equal_files_are_no_matter() -> None:
    assert difference({"a": GOOD, "b": dict(reversed(GOOD.items())), "c": GOOD}) is None


@pytest.mark.parametrize("name", GOOD)
def test_another_file_is_named_with_both_hashes(name: str) -> None:
    error = difference({"a": GOOD, "b": {**GOOD, name: "f" * 64}})
    assert error is not None
    assert error.node == "b"
    assert f"another {name} than a" in error.cause
    assert "f" * 16 in error.cause
    assert GOOD[name][:16] in error.cause
    assert "nothing was loaded" in error.cause
    assert "Copy" in str(error.advice)


def test_a_file_too_many_and_one_too_few_are_told_apart() -> None:
    more = difference({"a": GOOD, "b": {**GOOD, "chat_template.jinja": "e" * 64}})
    assert more is not None
    assert "b: has a chat_template.jinja with sha256 eeee" in str(more)
    less = difference({"a": GOOD, "b": {"config.json": "c" * 64}})
    assert less is not None
    assert "b: has no model.safetensors, which a has with sha256 0123" in str(less)


def test_the_odd_one_out_is_to_blame_even_if_it_comes_first() -> None:
    error = difference({"a": {**GOOD, "config.json": "d" * 64}, "b": GOOD, "c": GOOD})
    assert error is not None
    assert error.node == "a"


@pytest.mark.parametrize(
    "told", [{}, {"digests": []}, {"digests": {}}, {"digests": {"a": "short"}}, {"digests": {"a": 1}}]
)
def test_a_word_that_is_none_is_refused(told: dict[str, object]) -> None:
    with pytest.raises(WireError) as caught:
        sameness._read({"type": "reply", **told}, "mac2")
    assert caught.value.node == "mac2"
