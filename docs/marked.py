"""A page of which one part is drawn from the code, between two marks: what the scripts `draw_*.py` share.

    python -m docs.draw_catalogue            # prints what stands between the marks of its page
    python -m docs.draw_catalogue --write    # puts it there

Tests hold the pages against the scripts, so that none can say anything else than the code does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

WRITE = "--write"


class Marked:
    """One page.

    Args:
        page: its name, without the suffix.
        script: the file that draws the part.
        what: the part is, in its marks.
    """

    def __init__(self, page: str, script: str, what: str) -> None:
        self._path = Path(__file__).with_name(f"{page}.md")
        self._begin = f"<!-- {what}: python -m docs.{Path(script).stem} {WRITE} -->\n"
        self._end = f"<!-- end of {what} -->\n"

    def lines(self) -> list[str]:
        """What stands between the marks now."""
        return self._cut()[1].splitlines()

    def main(self, draw: Callable[[], Iterable[str]]) -> None:
        """What a script does when it is run: print what `draw` gives, or write it."""
        drawn = "".join(f"{line}\n" for line in draw())
        if WRITE in sys.argv:
            before, _, after = self._cut()
            self._path.write_text(before + self._begin + drawn + self._end + after, encoding="utf-8")
        else:
            print(drawn, end="")

    def _cut(self) -> tuple[str, str, str]:
        before, rest = self._path.read_text(encoding="utf-8").split(self._begin)
        drawn, after = rest.split(self._end)
        return before, drawn, after


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines."""
    return [row(head), f"|{'---|' * len(head)}", *map(row, rows)]


def row(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
