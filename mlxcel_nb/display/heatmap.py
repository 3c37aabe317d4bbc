"""What `net test` measured: who reaches whom how fast, as heat maps. Pure: from a `mesh.Mesh` to a `View`.

Three things tell how a pair does beside its colour: the figure itself, a bar of five heights, and a mark where
something is wrong. The colour is one hue over the page's own background, so text stays readable in light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass

from mlxcel_nb.display.view import DIM, FG, FONT, INDENT, LINE, TABULAR, View, stack, table
from mlxcel_nb.net.measuring.mesh import HERE, Mesh, Pair, summary, warnings
from mlxcel_nb.util.units import rate_text, trip_text
from mlxcel_nb.wire.fields import printable

BARS = "▁▃▅▆▇"
SHADES = (0.06, 0.14, 0.24, 0.34, 0.46)
"""Opacity of the colour, by the same five steps."""

HUE = "0,103,166"
SLOW, FAILED = "!", "✕"

SHORT = 28
"""Characters of a reason within a cell; the whole of it stands below."""


@dataclass(frozen=True)
class _Cell:
    """What stands at one place: `level` is 0 to 4, None where nothing was measured."""

    text: str
    level: int | None = None
    mark: str = ""
    why: str = ""


def mesh_view(mesh: Mesh) -> View:
    """Both heat maps, what is slow and what failed, and what to do."""
    slow = warnings(mesh)
    rated, distant = (
        {(each.source, each.target) for each in slow if each.figure in (figure, "path")} for figure in ("rate", "trip")
    )
    rates = _map(
        "Bandwidth, from each row to each column",
        mesh,
        lambda pair: _figure(pair, rated, rate_text(pair.measured.bytes_per_s)) if pair.measured else None,
        _levels(mesh, lambda pair: pair.measured.bytes_per_s if pair.measured else math.nan),
    )
    trips = _map(
        "Round trip, median",
        mesh,
        lambda pair: _figure(pair, distant, trip_text(pair.measured.rtt_s)) if pair.measured else None,
        _levels(mesh, lambda pair: 1 / max(pair.measured.rtt_s, 1e-9) if pair.measured else math.nan),
    )
    notes = []
    rate, trip = mesh.median(lambda m: m.bytes_per_s), mesh.median(lambda m: m.rtt_s)
    if rate is not None and trip is not None:
        notes.append(f"Median of the pairs of nodes: {rate_text(rate)}, {trip_text(trip)}.")
    notes += [printable(f"{SLOW} {line}") for line in summary(mesh, slow)]
    failures: dict[str, list[str]] = {}
    for pair in mesh.failed:
        failures.setdefault(pair.failure, []).append(f"{pair.source} to {pair.target}")
    notes += [printable(f"{FAILED} {_few(pairs)}: {why}") for why, pairs in failures.items()]
    if not slow and not failures and rate is not None:
        notes.append("No path is slow.")
    return stack(rates, trips, table("", [], [], notes))


def _few(pairs: list[str]) -> str:
    return ", ".join(pairs[:4]) + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")


def _figure(pair: Pair, marked: set[tuple[str, str]], text: str) -> tuple[str, str]:
    return text, SLOW if (pair.source, pair.target) in marked else ""


def _levels(mesh: Mesh, goodness: Callable[[Pair], float]) -> Callable[[Pair], int | None]:
    """A step for each pair: 4 within a quarter of the best, and one less for each halving."""
    values = [value for pair in mesh.pairs if (value := goodness(pair)) > 0]
    best = max(values, default=1.0)

    def level(pair: Pair) -> int | None:
        value = goodness(pair)
        if not value > 0:
            return None if math.isnan(value) else 0
        return max(0, 4 - int(math.log2(best / value) + 0.6))

    return level


def _map(
    title: str,
    mesh: Mesh,
    figure: Callable[[Pair], tuple[str, str] | None],
    level: Callable[[Pair], int | None],
) -> View:
    targets = [node for node in mesh.nodes if node != HERE]
    sources = [node for node in mesh.nodes if any(pair.source == node for pair in mesh.pairs)]
    rows = [(source, [_cell(mesh.pair(source, target), figure, level) for target in targets]) for source in sources]
    return View(_text(title, targets, rows), _html(title, targets, rows))


def _cell(
    pair: Pair | None, figure: Callable[[Pair], tuple[str, str] | None], level: Callable[[Pair], int | None]
) -> _Cell:
    if pair is None:
        return _Cell("")
    shown = figure(pair)
    if shown is None:
        why = printable(pair.failure)
        short = printable(pair.error).rpartition(": ")[2]  # what it comes down to: connection refused
        if len(short) > SHORT:
            short = f"{short[: SHORT - 1].rstrip()}…"
        return _Cell(short, mark=FAILED, why=why)
    return _Cell(shown[0], level(pair), shown[1])


def _words(cell: _Cell) -> str:
    if cell.mark == FAILED:
        return f"{FAILED} {cell.text}"
    bar = BARS[cell.level] if cell.level is not None else " "
    return f"{bar} {cell.text}{f' {cell.mark}' if cell.mark else ''}" if cell.text else "·"


def _text(title: str, targets: list[str], rows: list[tuple[str, list[_Cell]]]) -> str:
    lines = [["", *map(printable, targets)], *([printable(source), *map(_words, cells)] for source, cells in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(targets) + 1)]
    return "\n".join(
        [
            title,
            *(
                "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                for line in lines
            ),
        ]
    )


def _html(title: str, targets: list[str], rows: list[tuple[str, list[_Cell]]]) -> str:
    pad = "padding:3px 10px;text-align:right"
    head = "".join(
        f'<th scope="col" style="{pad};font-weight:500;{DIM}">{html.escape(printable(each))}</th>' for each in targets
    )
    body = "".join(
        f'<tr><th scope="row" style="{pad};text-align:left;font-weight:500;{DIM}">{html.escape(printable(source))}</th>'
        + "".join(_cell_html(cell, pad) for cell in cells)
        + "</tr>"
        for source, cells in rows
    )
    return (
        f'<div style="{FONT};{INDENT};margin:2px 0 8px"><div style="font-weight:600">{html.escape(title)}</div>'
        f'<table style="border-collapse:separate;border-spacing:2px;margin:2px 0;font:inherit;{TABULAR};{FG}">'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell_html(cell: _Cell, pad: str) -> str:
    if cell.mark == FAILED:
        error = "color:var(--jp-error-color1,#c0392b)"
        return (
            f'<td style="{pad};border:{LINE};{error}" title="{html.escape(cell.why)}">{html.escape(_words(cell))}</td>'
        )
    shade = f"background:rgba({HUE},{SHADES[cell.level]})" if cell.level is not None else ""
    slow = ";outline:2px solid var(--jp-warn-color1,#b86e00);outline-offset:-2px;font-weight:600" if cell.mark else ""
    return f'<td style="{pad};white-space:nowrap;{shade}{slow}">{html.escape(_words(cell))}</td>'
