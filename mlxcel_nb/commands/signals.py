"""Ctrl-C and SIGTERM as the ordinary ends of a server: the first asks it to stop, the next not to wait. Main thread."""

from __future__ import annotations

import queue
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class Signals:
    """While it is entered, both signals are noted and raise nothing, so that what runs is stopped in order.

    Args:
        again: called on each signal after the first, in the signal's handler.
    """

    def __init__(self, again: Callable[[], None]) -> None:
        self._again = again
        self._asked = False
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()  # whose `put` may interrupt a `get`
        self._before: dict[signal.Signals, Any] = {}

    def wait(self, seconds: float) -> bool:
        """Whether the first one has come, or does within `seconds`."""
        if not self._asked:
            try:
                self._news.get(timeout=seconds)
            except queue.Empty:
                return False
        return True

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._asked:
            self._again()
        self._asked = True
        self._news.put(signum)
