"""The notebook's console: display objects with a plain-text twin, text through the cell's standard output.

Used from the thread that executes the cell, whose output everything becomes; progress may be updated from any thread,
as it rewrites a display that already has its place.
"""

from __future__ import annotations

import sys
from typing import Any

from IPython.display import display

from mlxcel_nb.commands.console import UPDATES_PER_S, Console, Progress, reading_text
from mlxcel_nb.display.view import View, note, printable


class NotebookConsole(Console):
    """Writes into the cell that runs now."""

    def __init__(self) -> None:
        self._at_line_start = True
        self._reading: Any = None

    def show(self, view: View) -> None:
        display(view)

    def write(self, text: str) -> None:
        if text:
            self._at_line_start = text.endswith("\n")
            sys.stdout.write(printable(text))
            sys.stdout.flush()

    def end_text(self) -> None:
        if not self._at_line_start:
            self.write("\n")

    def reading(self, prefill: tuple[int, int] | None) -> None:
        view = note(reading_text(*prefill)) if prefill else View("", "")
        if self._reading is None:
            self._reading = display(view, display_id=True)
        else:
            self._reading.update(view)
        if prefill is None:
            self._reading = None

    def remark(self, view: View) -> None:
        display(view)

    def progress(self, title: str) -> Progress:
        handle: Any = None

        def draw(view: View) -> None:
            nonlocal handle
            if handle is None:
                handle = display(view, display_id=True)
            else:
                handle.update(view)

        return Progress(title, draw=draw, end=lambda view, _: draw(view), interval_s=1 / UPDATES_PER_S)
