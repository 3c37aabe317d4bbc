"""Ctrl-C as an event."""

from __future__ import annotations

import signal
import threading

import pytest

from mlxcel_nb.util import interrupts


def test_an_interrupt_is_an_event_inside_and_an_exception_outside() -> None:
    seen = []
    with interrupts.handed_to(lambda: seen.append("once")):
        signal.raise_signal(signal.SIGINT)
    assert seen == ["once"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_another_thread_leaves_the_signal_handler_alone() -> None:
    def block() -> None:
        with interrupts.handed_to(lambda: None):
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
