"""Ctrl-C as an event instead of an exception, for code that must not be torn in the middle.

Python raises KeyboardInterrupt between any two instructions of the main thread, also in an `except` or a `finally`
that cleans up after the first one. While `handed_to` is active it raises nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def handed_to(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` on each SIGINT of the block. Other threads than the main one, and other handlers, are let be."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: note())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
