"""Where a command's words go. `Console` is the contract; `TerminalConsole` is a terminal or a pipe.

The notebook's twin is `notebook.console`. Commands know only this interface, so the same handler serves a cell and a
shell. Consoles are used from one thread, progress excepted: its updates may come from any.
"""

from __future__ import annotations

import abc
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from mlxcel_nb.display.view import View, note, printable, progress
from mlxcel_nb.errors import Cancelled

UPDATES_PER_S = 10
LINE_S = 5.0
"""Where lines cannot be rewritten (a log, a pipe), progress is told this seldom."""


class Progress:
    """A piece of work with a known or unknown length. The last state is always shown.

    Use as a context manager; `update` may be called from any thread, as often as is handy.

    Args:
        draw: shows a state in place of the one before.
        end: shows the last one, or the result that `finish` gave.
    """

    def __init__(
        self,
        title: str,
        *,
        draw: Callable[[View], None],
        end: Callable[[View, bool], None],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._draw = draw
        self._end = end
        self._interval_s = interval_s
        self._clock = clock
        self._next = float("-inf")
        self._state: tuple[float, float, str] = (0.0, 0.0, "")
        self._result: View | None = None
        self._closed = False
        self._lock = threading.Lock()

    def update(self, done: float, total: float, detail: str = "") -> None:
        """Note the state; it is drawn when the interval has passed."""
        with self._lock:
            self._state = (done, total, detail)
            now = self._clock()
            if self._closed or now < self._next:
                return
            self._next = now + self._interval_s
            self._draw(progress(self._title, done, total, detail))

    def finish(self, result: View) -> None:
        """Show `result` in the end, in place of the bar."""
        self._result = result

    def __enter__(self) -> Self:
        self.update(0, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            done, total, _ = self._state
            if kind is not None:
                ended = "failed" if issubclass(kind, Exception) and not issubclass(kind, Cancelled) else "stopped"
                at = f" at {done / total:.0%}" if total > 0 else ""
                self._end(note(f"{self._title}: {ended}{at}"), False)  # a bar would promise that it goes on
            elif self._result is not None:
                self._end(self._result, True)
            else:
                self._end(progress(self._title, total, total, finished=True), False)


class Console(abc.ABC):
    """A place to show things."""

    @abc.abstractmethod
    def show(self, view: View) -> None:
        """A result: a table, a listing."""

    @abc.abstractmethod
    def write(self, text: str) -> None:
        """A piece of an answer, at once and as it is."""

    @abc.abstractmethod
    def end_text(self) -> None:
        """The answer is over: what follows starts on a new line."""

    @abc.abstractmethod
    def reading(self, prefill: tuple[int, int] | None) -> None:
        """How much of a long prompt has been read, in one place; None takes it away. Nothing where lines stay."""

    @abc.abstractmethod
    def remark(self, view: View) -> None:
        """Something beside the result: a footer, a notice."""

    @abc.abstractmethod
    def progress(self, title: str) -> Progress:
        """A progress display, to be used in a `with`."""

    def say(self, text: str) -> None:
        """One line as a result."""
        self.show(View(text, note(text).html))


class TerminalConsole(Console):
    """Plain text: results to `out`, remarks and progress to `err`.

    A line is rewritten, or dimmed, only on a terminal, and dimmed only without NO_COLOR.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        self._at_line_start = True
        self._safe = _is_terminal(self.out)

    def show(self, view: View) -> None:
        self.out.write(f"{view.text}\n")  # at once: `print` may write the end of a line after another thread's line
        self.out.flush()

    def write(self, text: str) -> None:
        if text:
            self._at_line_start = text.endswith("\n")
            self.out.write(printable(text) if self._safe else text)
            self.out.flush()

    def end_text(self) -> None:
        if not self._at_line_start:
            self.out.write("\n")
            self.out.flush()
            self._at_line_start = True

    def reading(self, prefill: tuple[int, int] | None) -> None:
        if _is_terminal(self.err):
            self.err.write(f"\r\x1b[K{reading_text(*prefill) if prefill else ''}")
            self.err.flush()

    def remark(self, view: View) -> None:
        dim = _is_terminal(self.err) and not os.environ.get("NO_COLOR")
        self.err.write(f"\x1b[2m{view.text}\x1b[0m\n" if dim else f"{view.text}\n")
        self.err.flush()

    def progress(self, title: str) -> Progress:
        rewrite = _is_terminal(self.err)

        def draw(view: View) -> None:
            self.err.write(f"\r\x1b[K{view.text}" if rewrite else f"{view.text}\n")
            self.err.flush()

        def end(view: View, result: bool) -> None:
            if result:
                self.err.write("\r\x1b[K" if rewrite else "")
                self.err.flush()
                self.show(view)
            else:
                draw(view)
                self.err.write("\n" if rewrite else "")

        return Progress(title, draw=draw, end=end, interval_s=1 / UPDATES_PER_S if rewrite else LINE_S)


def reading_text(done: int, total: int) -> str:
    """The sign of life before the first token of a long prompt."""
    return f"reading the prompt {done} of {total}"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False
