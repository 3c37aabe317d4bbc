"""Tokens into the cell: when to write, and how to wait so that an interrupt is felt at once.

`Coalescer` decides and is pure: the clock is an argument. `pump` is the one loop; it runs on the thread that executes
the cell, so every write belongs to that cell, and never waits longer than `WAIT_S` in one go.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from mlxcel_nb.client.report import Completion, Delta

UPDATES_PER_S = 25
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


class Stream(Protocol):
    """What `Cluster.stream` returns, as far as this module cares."""

    def __iter__(self) -> Iterator[Delta]: ...
    def cancel(self) -> None: ...
    def result(self) -> Completion: ...


class End:
    """The stream is over; `error` is what ended it, if not its natural end."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Reader:
    """Iterates a stream on a thread of its own, so that the cell's thread can wait with a time-out."""

    def __init__(self, deltas: Iterable[Delta]) -> None:
        self._queue: queue.SimpleQueue[str | End] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, args=(deltas,), name="mlxcel-stream", daemon=True)
        self._thread.start()

    def _read(self, deltas: Iterable[Delta]) -> None:
        error: BaseException | None = None
        try:
            for delta in deltas:
                self._queue.put(delta.text)
        except BaseException as problem:  # noqa: BLE001 - handed to the cell's thread, which raises it
            error = problem
        self._queue.put(End(error))

    def poll(self, timeout_s: float) -> str | End | None:
        """The next piece, the end, or None after `timeout_s`."""
        try:
            return self._queue.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            return None


def pump(
    poll: Callable[[float], str | End | None],
    write: Callable[[str], object],
    *,
    deadline: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Write what `poll` gives until its end. Whatever was received is written, also when this raises.

    Returns:
        False when `deadline` passed first.
    """
    coalescer = Coalescer()
    try:
        while (now := clock()) < deadline:
            held = coalescer.wait_s(now)
            piece = poll(min(WAIT_S if held is None else held, deadline - now))
            if isinstance(piece, End):
                if piece.error is not None:
                    raise piece.error
                return True
            if text := coalescer.add(piece or "", clock()):
                write(text)
        return False
    finally:
        if text := coalescer.flush(clock()):
            write(text)


def show_stream(stream: Stream, write: Callable[[str], object], *, drain_s: float = DRAIN_S) -> tuple[Completion, bool]:
    """Show an answer as it comes; an interrupt cancels it on every rank and keeps the text so far.

    Returns:
        The stream's result, and whether the user interrupted.

    Raises:
        MlxcelError: whatever ended the stream; the text that came before has been written.
    """
    reader = Reader(stream)
    try:
        pump(reader.poll, write)
        return stream.result(), False
    except KeyboardInterrupt:
        stream.cancel()
    pump(reader.poll, write, deadline=time.monotonic() + drain_s)
    return stream.result(), True
