"""Calls of tools are told from text, wherever the pieces of an answer begin and end."""

from __future__ import annotations

import itertools

import pytest

from mlxcel_nb.serve.tools import HERMES, LLAMA, MISTRAL, Form, Reader, form_of


def read(form: Form, text: str, cuts: tuple[int, ...] = ()) -> tuple[str, list[tuple[str, str]]]:
    """What is said and called in `text`, which comes in pieces."""
    reader = Reader(form)
    edges = (0, *cuts, len(text))
    said = "".join(reader.feed(text[a:b]) for a, b in itertools.pairwise(edges)) + reader.flush()
    return said, [(call.name, call.arguments) for call in reader.calls]


ANSWERS = [
    (HERMES, "Hello, 1 < 2.", ("Hello, 1 < 2.", [])),
    (HERMES, 'Wait.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ("Wait.", [("f", '{"x": 1}')])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g"}</tool_call>!',
        ("!", [("f", "{}"), ("g", "{}")]),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [("f", '{"x": 1}')])),
    (HERMES, "<tool_call>not JSON</tool_call> so", ("<tool_call>not JSON</tool_call> so", [])),
    (HERMES, '<tool_call>{"name": "f", "argu', ('<tool_call>{"name": "f", "argu', [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"s": "é"}}', ("", [("f", '{"s": "é"}')])),
    (HERMES, "a <tool", ("a <tool", [])),
    (MISTRAL, 'So [TOOL_CALLS][{"name": "f"}, {"name": "g"}]', ("So ", [("f", "{}"), ("g", "{}")])),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    (LLAMA, ' {"name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    (LLAMA, 'As {"name": "f"} says', ('As {"name": "f"} says', [])),
    (LLAMA, '{"name": "Ada", "age": 36} is a person', ('{"name": "Ada", "age": 36} is a person', [])),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), ANSWERS, ids=[text[:24] for _, text, _ in ANSWERS])
def test_an_answer_in_any_two_pieces_or_in_single_characters(form: Form, text: str, expected: object) -> None:
    for cut in range(len(text) + 1):
        assert read(form, text, (cut,)) == expected
    assert read(form, text, tuple(range(1, len(text)))) == expected


def test_text_goes_on_at_once_where_no_call_can_begin() -> None:
    reader = Reader(HERMES)
    assert reader.feed("Hello") == "Hello"
    assert reader.feed(" <") == " "
    assert reader.feed("b") == "<b"


def test_every_call_has_an_id_of_its_own() -> None:
    reader = Reader(HERMES)
    reader.feed('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>')
    first, second = reader.calls
    assert first.id.startswith("call_") and first.id != second.id


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<tool_call>' }}", HERMES),
        ("[TOOL_CALLS]", MISTRAL),
        ('{"name": "x", "parameters": {}}', LLAMA),
        ("<tool_call><function=f>", None),
        ("<tool_call>f<arg_key>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_template_says_how_calls_are_written(template: str, form: Form | None) -> None:
    assert form_of(template) == form
