"""The page of tensor plans says what the plans say."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.models import catalogue
from tests.catalogue import chosen

DOCS = Path(__file__).parents[3] / "docs"
DRAW: dict[str, Any] = runpy.run_path(str(DOCS / "draw_tensor_plans.py"))
PAGE = (DOCS / "tensor-plans.md").read_text(encoding="utf-8").split("\n")


@pytest.mark.parametrize("name", chosen(("llama", "gemma3n", "bitnet", "deepseek_v3")))
def test_the_page_has_the_row_that_the_plans_give(name: str) -> None:
    assert DRAW["row"](name) in PAGE


def test_the_page_has_a_row_for_every_architecture() -> None:
    assert [line.split("`")[1] for line in PAGE if line.startswith("| `")] == catalogue.architectures()
