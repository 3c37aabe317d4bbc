"""Writes the table of what every split of every architecture gave, `verify --catalogue`.

    make verified                                       # all that follows
    mlxcel-nb verify --catalogue --json > found.json
    python -m docs.draw_verified found.json --write     # keeps the figures in docs/verified.json, and writes the page

Several files, each of some architectures or layouts, are put together; what a later one says of both counts. Without a
file the page is drawn from the figures that are kept; without `--write` it is printed. What is computed whole on every
rank comes from the plans. `tests/models/verifying/test_page.py` holds the page against figures and catalogue.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docs import draw_tensor_plans
from docs.marked import WRITE, Marked, table

PAGE = Marked("verified", __file__, "the figures")
KEPT = Path(__file__).with_name("verified.json")

LIBRARIES = {"mlx_lm": "mlx-lm", "mlx": "mlx", "mlxcel_nb": "mlxcel_nb"}
"""Those that the figures depend on, and what they are called."""

NO_EXPERTS = "no experts"
"""What every dense model is refused for in layouts that spread experts: no remark worth a line each."""


def gather(files: Sequence[Path]) -> dict[str, Any]:
    """What `verify --catalogue --json` gave, as it is kept: {"versions", "layouts", "architectures"}.

    An architecture has {"cannot"}, mlx-lm's own error, or {"untested"}; else of each layout max |Δlogit|, or why it was
    refused, what it raised, or where it differs.
    """
    told = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    versions = [{name: one["versions"].get(name, "") for name in LIBRARIES} for one in told]
    if any(one != versions[0] for one in versions):
        raise SystemExit(f"these files are of different libraries: {versions}")
    findings = [each for one in told for each in one["catalogue"]]
    layouts = dict.fromkeys(verdict["layout"] for each in findings for verdict in each["verdicts"])
    found: dict[str, dict[str, Any]] = {name: {} for name in sorted(each["name"] for each in findings)}
    for each in findings:
        found[each["name"]] |= _found(each)
    return {"versions": versions[0], "layouts": list(layouts), "architectures": found}


def _found(finding: dict[str, Any]) -> dict[str, Any]:
    if finding["untested"]:
        return {"untested": True}
    if finding["cannot"]:
        return {"cannot": finding["cannot"]}
    return {verdict["layout"]: _figure(verdict) for verdict in finding["verdicts"]}


def _figure(verdict: dict[str, Any]) -> Any:
    """A number where the split is equal, words where it is not."""
    if verdict["refused"] or verdict["failed"]:
        return f"refused: {verdict['refused']}" if verdict["refused"] else f"failed: {verdict['failed']}"
    if not verdict["equal"]:
        return f"differs: {verdict['delta']}, first at layer {verdict['layer']}"
    return float(f"{verdict['delta']:.2g}")


def keep(found: dict[str, Any]) -> None:
    """A line for each architecture, so that a change shows which it is of."""
    rows = [f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in found["architectures"].items()]
    head = [f" {json.dumps(key)}: {json.dumps(found[key])}," for key in ("versions", "layouts")]
    lines = ["{", *head, ' "architectures": {', ",\n".join(rows), " }", "}"]
    KEPT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


def draw(found: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{called} {found['versions'][name]}" for name, called in LIBRARIES.items())
    layouts = found["layouts"]
    head = ("architecture", *layouts, "computed whole on every tensor rank", "remarks")
    rows = [_row(name, figures, layouts) for name, figures in found["architectures"].items()]
    return [f"Run with {versions}.", "", *table(head, rows)]


def _row(name: str, figures: dict[str, Any], layouts: Sequence[str]) -> list[str]:
    _, _, whole = draw_tensor_plans.cells(name)
    ran = any(layout in figures for layout in layouts)
    return [
        f"`{name}`",
        *(cell(figures.get(layout)) for layout in layouts),
        whole.replace(" on every tensor rank", "").replace(" is computed whole", "") if ran else "",
        "; ".join(_remarks(figures, layouts)),
    ]


def cell(figure: Any) -> str:
    """What stands in a layout's column."""
    if figure is None:
        return ""
    if isinstance(figure, str):
        return NO_EXPERTS if NO_EXPERTS in figure else figure.partition(":")[0]
    return f"{figure:.1e}" if figure else "equal bits"


def _remarks(figures: dict[str, Any], layouts: Sequence[str]) -> Iterator[str]:
    if "untested" in figures:
        yield "untested"
    if "cannot" in figures:
        yield f"mlx-lm's own run fails on a CPU: {figures['cannot']}"
    said: dict[str, list[str]] = {}
    for layout in layouts:
        if isinstance(figure := figures.get(layout), str) and NO_EXPERTS not in figure:
            said.setdefault(figure, []).append(layout)
    for figure, where in said.items():
        yield f"{', '.join(where)} {figure}"


def main() -> None:
    files = [Path(word) for word in sys.argv[1:] if word != WRITE]
    found = gather(files) if files else kept()
    if files and WRITE in sys.argv:
        keep(found)
    PAGE.main(lambda: draw(found))


if __name__ == "__main__":
    main()
