"""Writes the table of architectures from the catalogue, `mlxcel_nb/models/catalogue`.

    python docs/draw_catalogue.py            # prints what stands in docs/architectures.md between the two marks
    python docs/draw_catalogue.py --write    # puts it there

`tests/models/test_catalogue.py` holds the page against it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlxcel_nb.models import catalogue

PAGE = Path(__file__).with_name("architectures.md")
BEGIN = "<!-- from the catalogue: python docs/draw_catalogue.py --write -->\n"
END = "<!-- end of the catalogue -->\n"


def table() -> list[str]:
    lines = ["| architecture | what is special in it | remarks |", "|---|---|---|"]
    for name in catalogue.architectures():
        entry = catalogue.entry(name)
        if entry is None:
            lines.append(f"| `{name}` | | untested |")
            continue
        remarks = [entry.note]
        if entry.drifts:
            remarks.append(f"mlx-lm's own decoding differs from its reading: {entry.drifts}")
        if entry.fails:
            remarks.append(f"mlx-lm's own run fails on a CPU: {entry.fails}")
        lines.append(f"| `{name}` | {'; '.join(entry.features)} | {'; '.join(filter(None, remarks))} |")
    return lines


def section() -> str:
    """What stands between the marks."""
    return "\n".join([*table(), ""])


def main() -> None:
    if "--write" not in sys.argv:
        print(section(), end="")
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + section() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
