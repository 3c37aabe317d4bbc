"""SIGHUP, which says one of two things: "read your settings again", or "your terminal is gone".

A server that is started from a terminal hears both. One that took them all for the first would stay behind, unseen,
when the window is closed. Made and called on the main thread, or on its asyncio loop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


class HangUp:
    """A handler of SIGHUP; to be made before it is installed.

    Args:
        again: called when somebody sends the signal.
        gone: called when the terminal that the process had is gone; not under `nohup`, which is there to forbid it.
    """

    def __init__(self, again: Callable[[], object], gone: Callable[[], object]) -> None:
        self._again = again
        self._gone = gone
        self._outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._terminal = _has_terminal()

    def __call__(self, *_: object) -> None:
        had, self._terminal = self._terminal, _has_terminal()
        if not had or self._terminal:
            self._again()
        elif not self._outlives:
            self._gone()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal: the system takes it away before it says so."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
