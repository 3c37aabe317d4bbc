"""SIGHUP, which says one of two things: "read your settings again", or "your terminal is gone".

A server that is started from a terminal hears both. One that took them all for the first would stay behind, unseen,
when the window is closed. Made and called on the main thread, or on its asyncio loop. Imports next to nothing, for
`hold` is to stand before anything else is imported.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


def hold() -> None:
    """From now on SIGHUP ends nothing: it is remembered for the `HangUp` to come, unless the terminal is gone."""
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _Held())


class _Held:
    """The handler of `hold`."""

    def __init__(self) -> None:
        self.heard = False
        self._terminal = _Terminal()

    def __call__(self, *_: object) -> None:
        if self._terminal.went():
            sys.exit(0)
        self.heard = True


class HangUp:
    """A handler of SIGHUP; to be made before it is installed. When it is, `catch_up` tells of what came before.

    Args:
        again: called when somebody sends the signal.
        gone: called when the terminal that the process had is gone; not under `nohup`, which is there to forbid it.
    """

    def __init__(self, again: Callable[[], object], gone: Callable[[], object]) -> None:
        self._again = again
        self._gone = gone
        self._before = signal.getsignal(signal.SIGHUP)
        self._terminal = _Terminal()

    def __call__(self, *_: object) -> None:
        if not self._terminal.went():
            self._again()
        elif self._before is not signal.SIG_IGN:
            self._gone()

    def catch_up(self) -> None:
        """Somebody may have sent the signal since `hold`."""
        if isinstance(self._before, _Held) and self._before.heard:
            self._before.heard = False
            self._again()


class _Terminal:
    """The terminal this process was started from, if any."""

    def __init__(self) -> None:
        self._there = _has_terminal()
        self._shown = [fd for fd in (1, 2) if os.isatty(fd)]

    def went(self) -> bool:
        """Whether it is gone since the last look. What is still said to it then is dropped: it would be an error."""
        before, self._there = self._there, _has_terminal()
        if not before or self._there:
            return False
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for fd in self._shown:
            os.dup2(nowhere, fd)
        os.close(nowhere)
        return True


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal: the system takes it away before it says so."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
