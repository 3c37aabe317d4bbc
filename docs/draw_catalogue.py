"""Writes the table of architectures from the catalogue, `mlxcel_nb/models/catalogue`.

`python -m docs.draw_catalogue --write` puts it in docs/architectures.md; without `--write` it is printed.
`tests/models/test_catalogue.py` holds the page against it.
"""

from __future__ import annotations

from docs.marked import Marked, table
from mlxcel_nb.models import catalogue

PAGE = Marked("architectures", __file__, "the catalogue")


def draw() -> list[str]:
    head = ("architecture", "what is special in it", "remarks")
    return table(head, map(_row, catalogue.architectures()))


def _row(name: str) -> tuple[str, str, str]:
    entry = catalogue.entry(name)
    if entry is None:
        return f"`{name}`", "", "untested"
    remarks = [entry.note]
    if entry.drifts:
        remarks.append(f"mlx-lm's own decoding differs from its reading: {entry.drifts}")
    if entry.fails:
        remarks.append(f"mlx-lm's own run fails on a CPU: {entry.fails}")
    return f"`{name}`", "; ".join(entry.features), "; ".join(filter(None, remarks))


if __name__ == "__main__":
    PAGE.main(draw)
