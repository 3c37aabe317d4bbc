"""The page of verified splits says what was found, of every architecture, and what is not equal has its reason."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs import draw_tensor_plans, draw_verified
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.verifying import __main__
from mlxcel_nb.models.verifying.catalogued import Finding
from mlxcel_nb.models.verifying.comparing import Verdict

FOUND = draw_verified.kept()
ARCHITECTURES: dict[str, dict[str, Any]] = FOUND["architectures"]
MODELS = (Path(draw_verified.__file__).with_name("models.md")).read_text(encoding="utf-8")
EVERYWHERE = {"tp2", "tp3", "tp4", "pp2", "pp3", "tp2xpp2"}
"""Layouts that every architecture is to be split in, or have a reason."""


def figures() -> Iterator[tuple[str, str, Any]]:
    for name, found in ARCHITECTURES.items():
        yield from ((name, layout, figure) for layout, figure in found.items() if layout != "cannot")


def test_the_page_is_drawn_from_the_figures() -> None:
    assert draw_verified.PAGE.lines() == draw_verified.draw(FOUND), "python -m docs.draw_verified --write"


def test_every_architecture_was_run_in_every_layout_or_cannot_be_as_the_catalogue_says() -> None:
    assert list(ARCHITECTURES) == catalogue.architectures(), "make verified"
    assert set(FOUND["layouts"]) >= EVERYWHERE
    for name, found in ARCHITECTURES.items():
        entry = catalogue.entry(name)
        assert entry is not None
        assert set(found) == ({"cannot"} if entry.fails else set(FOUND["layouts"])), name
        assert entry.fails in found.get("cannot", ""), name


def test_what_is_no_figure_is_refused_and_the_page_of_models_says_why() -> None:
    for name, layout, figure in figures():
        if isinstance(figure, str) and layout in EVERYWHERE:
            assert figure.startswith("refused: ")
            assert f"`{name}`" in MODELS
    for name, found in ARCHITECTURES.items():
        assert "cannot" not in found or f"`{name}`" in MODELS


def test_the_page_of_models_names_what_has_parts_on_every_rank() -> None:
    rows = [line for line in draw_tensor_plans.PAGE.lines() if " is computed whole on every tensor rank" in line]
    named = MODELS.partition("Some part is, whatever the number of ranks, in ")[2].partition(":")[0]
    assert re.findall("`(.*?)`", named) == [line.split("`")[1] for line in rows]


def test_the_page_says_that_nothing_was_compiled() -> None:
    page = Path(draw_verified.__file__).with_name("verified.md").read_text(encoding="utf-8")
    assert "mx.disable_compile()" in inspect.getsource(__main__._catalogue)
    assert "mx.disable_compile()" not in inspect.getsource(__main__._model)
    assert page.count("`mx.disable_compile()`") == 2


def test_all_figures_are_within_what_equal_means() -> None:
    numbers = {(name, layout): figure for name, layout, figure in figures() if not isinstance(figure, str)}
    assert max(numbers.values()) <= 1e-4


def told(*findings: Finding, mlx: str = "1") -> str:
    versions = {"mlx_lm": "2", "mlx": mlx, "mlxcel_nb": "3", "python": "4"}
    return json.dumps({"catalogue": [each.to_dict() for each in findings], "versions": versions})


def test_files_of_some_architectures_or_layouts_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_verified, "KEPT", tmp_path / "kept.json")
    equal = Verdict(layout="pp2", dtype="float32", tokens=9), Verdict(layout="tp2", dtype="float32", delta=2.5e-6)
    wrong, refused = Verdict(layout="pp2", delta=0.5, layer=3), Verdict(layout="tp2", refused="no such | thing")
    dense = Verdict(layout="ep2", refused="llama has no experts to spread")
    runs = (
        [Finding(name="qwen3", verdicts=(wrong,)), Finding(name="olmo", cannot="Error: no")],
        [Finding(name="llama", verdicts=(*equal, dense))],
        [Finding(name="qwen3", verdicts=(refused,))],
    )
    files = [tmp_path / str(number) for number, _ in enumerate(runs)]
    for file, findings in zip(files, runs, strict=True):
        file.write_text(told(*findings), encoding="utf-8")
    found = draw_verified.gather(files)
    draw_verified.keep(found)
    assert draw_verified.kept() == found
    rows = [line for line in draw_verified.draw(found) if line.startswith("| `")]
    assert rows == [
        "| `llama` | equal bits | 2.5e-06 | no experts |  |  |",
        "| `olmo` |  |  |  |  | mlx-lm's own run fails on a CPU: Error: no |",
        r"| `qwen3` | differs | refused |  |  | pp2 differs: 0.5, first at layer 3; tp2 refused: no such \| thing |",
    ]


def test_files_of_two_versions_do_not_make_one_page(tmp_path: Path) -> None:
    for mlx in ("1", "2"):
        (tmp_path / mlx).write_text(told(Finding(name="llama"), mlx=mlx), encoding="utf-8")
    with pytest.raises(SystemExit, match="different libraries"):
        draw_verified.gather([tmp_path / "1", tmp_path / "2"])
