"""Whether a request that comes now would wait too long for its first token. Pure; times are the caller's, in seconds.

A queue that is bounded in number alone is no promise: 256 requests are a second on one machine and half an hour on
another. So the wait is bounded: as many as wait now, at the rate at which the latest ones had their first text
(Little's law). Who would wait longer is told so at once, and when to come again.
"""

from __future__ import annotations

from collections import deque

MAX_WAIT_S = 60.0
"""Of a first token. People give up by then, and proxies cut what is silent for as long."""

FEW = 8
"""So many may wait on the slowest machine: those who press run together are let in, however rough the estimate."""

UNKNOWN = 32
"""So many may wait before that many first texts have come as tell a rate."""

LATEST = 16
"""First texts that the rate is taken from."""

MAX_RETRY_S = 60.0
"""Clients do not heed a hint that is longer."""


class Backlog:
    """The requests that wait for their first text."""

    def __init__(self, max_wait_s: float = MAX_WAIT_S) -> None:
        self.waiting = 0
        self._max_wait_s = max_wait_s
        self._gaps: deque[float] = deque(maxlen=LATEST)
        self._since = 0.0
        """When the latest one had its first text, or, if later, when somebody began to wait."""

    def come(self, now: float) -> None:
        """One begins to wait."""
        if not self.waiting:
            self._since = now
        self.waiting += 1

    def served(self, now: float) -> None:
        """One has its first text, or its end without any."""
        self.waiting -= 1
        self._gaps.append(now - self._since)
        self._since = now

    def leave(self) -> None:
        """One went, or failed, before that."""
        self.waiting -= 1

    def wait_s(self, now: float) -> float:
        """How long one that comes now is likely to wait. The longer nothing has happened, the longer."""
        if not self.waiting:
            return 0.0
        total, count, silence = sum(self._gaps), len(self._gaps), now - self._since
        return self.waiting * max(total / count if count else 0.0, (total + silence) / (count + 1))

    def retry_s(self, now: float) -> float | None:
        """In how many seconds there is likely to be room again; None while there is."""
        if self.waiting < FEW:
            return None
        over = self.wait_s(now) - self._max_wait_s
        if over <= 0 and (self.waiting < UNKNOWN or len(self._gaps) >= FEW):
            return None
        return min(max(over, 1.0), MAX_RETRY_S)
