"""Rows of text under their titles, each column as wide as its widest cell. Pure; anybody may call."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """A line for the titles and one for each row, without blanks at their ends.

    Args:
        right: whether a column is set flush right, as numbers are.
    """
    widths = [max(len(title), *(len(row[i]) for row in rows), 0) for i, title in enumerate(titles)]

    def line(cells: Sequence[str]) -> str:
        padded = zip(cells, widths, right, strict=True)
        return "  ".join(text.rjust(w) if flush else text.ljust(w) for text, w, flush in padded).rstrip()

    return [line(titles), *(line(row) for row in rows)]
