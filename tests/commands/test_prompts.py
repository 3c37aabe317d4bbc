"""Prompts are taken word for word, unless --template asks for more."""

from __future__ import annotations

import pytest

from mlxcel_nb.commands.parser import UsageProblem
from mlxcel_nb.commands.prompts import choose, interpolate


@pytest.mark.parametrize(
    ("option", "cell", "prompt"),
    [
        (None, "Hi\n", "Hi"),
        (None, "two\n\n", "two\n"),
        (None, "  kept \n", "  kept "),
        (None, "{a} $b %c \"d\" 'e'\n", "{a} $b %c \"d\" 'e'"),
        (None, "", ""),
        ("from the option", None, "from the option"),
        ("", None, ""),
        ("option", "\n", "option"),
        (None, None, None),
    ],
)
def test_a_prompt_loses_nothing_but_the_cells_last_line_end(
    option: str | None, cell: str | None, prompt: str | None
) -> None:
    assert choose(option, cell) == prompt


def test_two_prompts_are_one_too_many() -> None:
    with pytest.raises(UsageProblem, match="--prompt and a cell text"):
        choose("a", "b\n")


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{name} and $name", "Ada and Ada"),
        ("{{name}} costs $$5", "{name} costs $5"),
        ('{"json": [1, {}]} {name}', '{"json": [1, {}]} Ada'),
        ("{name.upper()} {1+1} $5 50%", "{name.upper()} {1+1} $5 50%"),
        ("{number}", "7"),
        ("", ""),
    ],
)
def test_a_template_takes_names_and_nothing_else(text: str, filled: str) -> None:
    assert interpolate(text, {"name": "Ada", "number": 7}) == filled


@pytest.mark.parametrize(("text", "keep"), [("{nme}", "{{nme}}"), ("$nme", "$$nme")])
def test_a_missing_variable_is_named_with_the_way_to_keep_it(text: str, keep: str) -> None:
    with pytest.raises(UsageProblem) as problem:
        interpolate(text, {"name": "Ada"})
    assert "no variable is called nme" in str(problem.value)
    assert keep in str(problem.value)
