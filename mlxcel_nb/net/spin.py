"""How long to poll before blocking: as long as it pays. For the thread that owns a link; no I/O.

Polling catches what comes within a moment without the cost of being woken up, if the one who sends it has a core of its
own. Where it has not, this very polling keeps it from sending. So the time grows with every catch and shrinks with
every miss.
"""

from __future__ import annotations

import time

MAX_SPIN_S = 150e-6
"""Polling longer than this before blocking costs more than it gains when ranks share cores."""

MIN_SPIN_S = 5e-6
"""Less than this is not worth a second look at the clock."""

TRY_AGAIN = 64
"""Misses in a row after which the whole time is tried once more: the cores may be free again."""


class Spin:
    """The time to poll for, in seconds.

    Args:
        most: the longest; 0 never polls, as befits ranks that share cores.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self.now = most
        self._missed = 0

    def until(self) -> float:
        """A `time.perf_counter()` value to poll until; 0 where polling does not pay."""
        return time.perf_counter() + self.now if self.now else 0.0

    def caught(self) -> None:
        """Something came while it was polled for, or before."""
        self._missed = 0
        if self.now < self.most:
            self.now = min(self.most, max(MIN_SPIN_S, 2 * self.now))

    def missed(self) -> None:
        """Nothing came."""
        self._missed += 1
        self.now = self.now / 2 if self.now > 2 * MIN_SPIN_S else 0.0
        if self._missed % TRY_AGAIN == 0:
            self.now = self.most
