"""How long to poll before blocking: as long as it pays. For the thread that owns a link; no I/O.

Polling catches what comes within a moment without the cost of being woken up, if the one who sends it has a core of its
own. Where it has not, this very polling keeps it from sending. So whoever polls in vain a few times stops, and tries
once in a while whether it pays again.
"""

from __future__ import annotations

import time

MAX_SPIN_S = 150e-6
"""Polling longer than this before blocking costs more than it gains when ranks share cores."""

CREDIT = 8
"""What a row of catches earns ..."""

MISS_COSTS = 3
"""... and a miss takes away: three in a row end it, one that stands alone does not."""

TRY_EVERY = 64
"""Without credit, one wait of so many is polled for: it may pay again."""


class Spin:
    """Whether to poll, and for how long.

    Args:
        most_s: the longest; 0 never polls, as befits ranks that share cores.
    """

    __slots__ = ("_credit", "_polled", "_waits", "most_s")

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._credit = CREDIT
        self._waits = 1
        self._polled = False

    def until(self) -> float:
        """Something that is waited for is not there: a `time.perf_counter()` value to poll until, at least once."""
        now = time.perf_counter()
        self._polled = bool(self.most_s) and (self._credit > 0 or not self._waits % TRY_EVERY)
        if self._credit <= 0:
            self._waits += 1
        return now + self.most_s if self._polled else now

    def caught(self) -> None:
        """It came while it was polled for."""
        if self._polled and self._credit < CREDIT:
            self._credit += 1

    def missed(self) -> None:
        """It did not."""
        if self._polled and self._credit > 0:
            self._credit = max(0, self._credit - MISS_COSTS)
