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

    __slots__ = ("_before", "_credit", "_waits", "most_s")

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self._credit = CREDIT
        self._before = CREDIT  # credit before the last poll
        self._waits = 1

    def until(self) -> float:
        """Something that is waited for is not there: a `time.perf_counter()` value to poll until, at least once.

        It is taken to come, until `missed` says that it did not: when it comes, there is no time to lose.
        """
        now, before = time.perf_counter(), self._credit
        self._before = before
        if before <= 0:
            self._waits += 1
            if self._waits % TRY_EVERY != 1:
                return now
        if not self.most_s:
            return now
        if before < CREDIT:
            self._credit = before + 1
        return now + self.most_s

    def missed(self) -> None:
        """What was polled for did not come."""
        if self._credit > 0:
            self._credit = max(0, self._before - MISS_COSTS)
