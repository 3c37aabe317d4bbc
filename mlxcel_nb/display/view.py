"""What is shown, twice: rich HTML for a page and plain text for everything else.

Pure functions from plain data to `View`s; no IPython import, so the terminal uses the text twins. Every string that
reaches HTML is escaped here. Colours come from JupyterLab's theme variables with fall-backs, styles are inline because
a reopened notebook strips style sheets, and no state is told by colour alone.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.util.columns import aligned

RUN_MIME = "application/vnd.mlxcel.run+json"

FONT = "font:13px/1.45 var(--jp-ui-font-family,system-ui,sans-serif)"
FG = "color:var(--jp-ui-font-color1,inherit)"
DIM = "color:var(--jp-ui-font-color2,#66707a)"
LINE = "1px solid var(--jp-border-color2,#d9dee3)"
TABULAR = "font-variant-numeric:tabular-nums"
INDENT = "padding-left:calc(var(--jp-code-padding,5px) + 2px)"
"""Puts what is shown flush with the code above it and the text a cell prints."""
LONG = 24
"""Characters; a cell of a table that has more may wrap, names and states never do."""

STATES = {
    "alive": ("●", "var(--jp-success-color1,#00795c)"),
    "suspect": ("◐", "var(--jp-warn-color1,#b86e00)"),
    "stalled": ("◐", "var(--jp-warn-color1,#b86e00)"),
    "dead": ("✕", "var(--jp-error-color1,#c0392b)"),
}


@dataclass(frozen=True)
class View:
    """One thing to show, with its plain-text twin and, where there is one, data for other programs."""

    text: str
    html: str
    data: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_wanted: Any) -> dict[str, Any]:
        return {"text/plain": self.text, "text/html": self.html, **self.data}


@dataclass(frozen=True)
class State:
    """A cell of a table that tells a node's state by shape, word and colour, and why."""

    name: str
    reason: str = ""

    @property
    def symbol(self) -> str:
        return STATES.get(self.name, ("○", ""))[0]

    def __str__(self) -> str:
        return f"{self.symbol} {self._words}"

    @property
    def _words(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name

    def html(self) -> str:
        colour = STATES.get(self.name, ("", "inherit"))[1]
        return f'<span style="color:{colour}" aria-hidden="true">{self.symbol}</span> {html.escape(self._words)}'


@dataclass(frozen=True)
class Column:
    """A column's title; numbers are set flush right."""

    title: str
    number: bool = False


def table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[object]], notes: Sequence[str] = ()) -> View:
    """Rows under titles. A column that is empty in every row is left out; None is shown as a dash."""
    used = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    columns = [columns[i] for i in used]
    rows = [[row[i] for i in used] for row in rows]
    texts = [[_text(cell) for cell in row] for row in rows]
    lines = [title] if title else []
    if rows:
        lines += aligned([c.title for c in columns], texts, [c.number for c in columns])
    lines += notes

    cell = f"padding:3px 14px 3px 0;border-bottom:{LINE}"
    whole = ";white-space:nowrap"
    align = [f"text-align:{'right' if column.number else 'left'};{cell}" for column in columns]
    head = "".join(
        f'<th scope="col" style="{a};font-weight:500;{DIM}">{html.escape(c.title)}</th>'
        for a, c in zip(align, columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{a}{whole if len(_text(cell)) <= LONG else ""}">{_html(cell)}</td>'
            for a, cell in zip(align, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    parts = [f'<div style="font-weight:600">{html.escape(title)}</div>'] if title else []
    if rows:
        parts.append(
            f'<table style="border-collapse:collapse;margin:2px 0;font:inherit;{TABULAR};{FG}">'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
    parts += [f'<div style="{DIM};{TABULAR}">{html.escape(note)}</div>' for note in notes]
    return View("\n".join(lines), _box("".join(parts)))


def stack(*views: View) -> View:
    """Several views, one under the other."""
    return View("\n\n".join(v.text for v in views), "".join(v.html for v in views))


def note(text: str) -> View:
    """One quiet line."""
    return View(text, _box(f'<span style="{DIM};{TABULAR}">{html.escape(text)}</span>'))


def progress(title: str, done: float, total: float, detail: str = "", *, finished: bool = False) -> View:
    """A bar with its text; `total` 0 means not known."""
    share = 1.0 if finished else min(max(done / total, 0.0), 1.0) if total > 0 else 0.0
    percent = f"{share:.0%}" if total > 0 else "done" if finished else "..."
    words = f"{title} {percent}{'  ' + detail if detail else ''}"
    known = f'aria-valuenow="{share * 100:.0f}" ' if finished or total > 0 else ""
    bar = (
        f'<div role="progressbar" aria-label="{html.escape(title)}" aria-valuemin="0" aria-valuemax="100" {known}'
        f'style="width:260px;height:6px;border-radius:3px;background:var(--jp-layout-color3,#d9dee3);margin:4px 0">'
        f'<div style="width:{share * 100:.1f}%;height:6px;border-radius:3px;background:var(--jp-brand-color1,#0067a6)">'
        "</div></div>"
    )
    return View(words, _box(f'<span style="{DIM};{TABULAR}">{html.escape(words)}</span>{bar}'))


def printable(text: str) -> str:
    """Model text for a terminal or a cell: control characters become their pictures, so no text can move the cursor."""
    if text.isprintable():
        return text
    return "".join(_picture(c) for c in text)


def _picture(char: str) -> str:
    code = ord(char)
    if char in "\n\t":
        return char
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    return "\u2426" if 0x80 <= code < 0xA0 else char


def _box(inner: str) -> str:
    return f'<div style="{FONT};{INDENT};margin:2px 0 8px">{inner}</div>'


def _text(cell: object) -> str:
    return "–" if cell is None else str(cell)


def _html(cell: object) -> str:
    return cell.html() if isinstance(cell, State) else html.escape(_text(cell))
