"""The page of tensor plans says what the plans say."""

from __future__ import annotations

import pytest

from docs import draw_tensor_plans
from docs.marked import row
from mlxcel_nb.models import catalogue
from tests.catalogue import chosen

PAGE = draw_tensor_plans.PAGE.lines()


@pytest.mark.parametrize("name", chosen(("llama", "gemma3n", "bitnet", "deepseek_v3")))
def test_the_page_has_the_row_that_the_plans_give(name: str) -> None:
    assert row(draw_tensor_plans.cells(name)) in PAGE, "python -m docs.draw_tensor_plans --write"


def test_the_page_has_a_row_for_every_architecture() -> None:
    assert [line.split("`")[1] for line in PAGE if line.startswith("| `")] == catalogue.architectures()
