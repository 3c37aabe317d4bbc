"""Tokens into the cell: when to write, and how to wait so that an interrupt is felt at once.

`Coalescer` decides and is pure: the clock is an argument. `pump` is the one loop; it runs on the thread that executes
the cell, so every write belongs to that cell, and never waits longer than `WAIT_S` in one go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from mlxcel_nb.client.report import Completion, Delta
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.util.interrupts import handed_to

UPDATES_PER_S = 30
"""A page stays smooth from about 20 updates a second, and JupyterLab sheds messages far above that."""

WAIT_S = 0.1
DRAIN_S = 1.0
"""After a cancel, how long to wait for the last tokens and the engines' word that they stopped."""


class Coalescer:
    """Joins small pieces of text so that at most one write happens in each interval; nothing is lost or reordered."""

    def __init__(self, interval_s: float = 1 / UPDATES_PER_S) -> None:
        self.interval_s = interval_s
        self._held: list[str] = []
        self._next = float("-inf")

    def add(self, text: str, now: float) -> str:
        """Take a piece; returns what to write at this moment, often nothing."""
        if text:
            self._held.append(text)
        return self.due(now)

    def due(self, now: float) -> str:
        """What to write at this moment, if the interval has passed."""
        return self._take(now) if self._held and now >= self._next else ""

    def wait_s(self, now: float) -> float | None:
        """Seconds until held text is due; None when nothing is held."""
        return max(0.0, self._next - now) if self._held else None

    def flush(self, now: float) -> str:
        """All that is held, due or not: the last update."""
        return self._take(now)

    def _take(self, now: float) -> str:
        text = "".join(self._held)
        self._held.clear()
        self._next = now + self.interval_s
        return text


Notice = Callable[[tuple[int, int] | None], object]


class Stream(Protocol):
    """What `Cluster.stream` returns, as far as this module cares."""

    text: str
    token_ids: tuple[int, ...]
    completion: Completion | None
    error: MlxcelError | None
    prefill: tuple[int, int] | None

    @property
    def done(self) -> bool: ...
    def next(self, timeout: float) -> Delta | None: ...
    def cancel(self) -> None: ...


class Asked:
    """Whether the user asked to stop: the first interrupt is noted, so that none falls between taking a token and
    showing it, and a second one is raised.
    """

    def __init__(self) -> None:
        self.stop = False

    def note(self) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True


def pump(
    stream: Stream,
    write: Callable[[str], object],
    *,
    notice: Notice | None = None,
    stop: Callable[[], bool] = lambda: False,
    deadline: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Write the stream's text until it is done, `stop` says so, or `deadline` passes.

    Whatever was received is written, also when this raises.

    Args:
        notice: told how far a long prompt has been read, ten times a second at most, and None when that is over.

    Raises:
        MlxcelError: what ended the stream.
    """
    coalescer = Coalescer()
    told: tuple[int, int] | None = None

    def tell(prefill: tuple[int, int] | None) -> None:
        nonlocal told
        if notice is not None and prefill != told:
            told = prefill
            notice(prefill)

    try:
        while not stream.done and not stop() and (now := clock()) < deadline:
            held = coalescer.wait_s(now)
            delta = stream.next(min(WAIT_S if held is None else held, deadline - now))
            tell(stream.prefill)
            if text := coalescer.add(delta.text if delta else "", clock()):
                write(text)
    finally:
        tell(None)
        if text := coalescer.flush(clock()):
            write(text)
    if stream.error is not None:
        raise stream.error


def show_stream(
    stream: Stream, write: Callable[[str], object], *, notice: Notice | None = None, drain_s: float = DRAIN_S
) -> tuple[Completion, bool]:
    """Show an answer as it comes; an interrupt cancels it on every rank and keeps the text so far.

    Returns:
        The answer, and whether the user interrupted it.

    Raises:
        MlxcelError: whatever ended the stream; the text that came before has been written.
    """
    asked = Asked()
    with handed_to(asked.note):
        try:
            pump(stream, write, notice=notice, stop=lambda: asked.stop)
            if asked.stop and not stream.done:
                stream.cancel()
                pump(stream, write, deadline=time.monotonic() + drain_s)
        except BaseException:
            stream.cancel()
            raise
    if stream.completion is not None:
        return stream.completion, asked.stop
    return Completion(
        text=stream.text,
        token_ids=stream.token_ids,
        finish_reason="cancelled",
        generation_tokens=len(stream.token_ids),
    ), True
