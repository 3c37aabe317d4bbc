"""Whether a request that comes now would wait too long for its first token. Pure; times are the caller's, in seconds.

A queue that is bounded in number alone is no promise: 256 requests are a second on one machine and half an hour on
another. So the wait is bounded: as many as go before it, at the rate at which the latest ones had their first text
(Little's law). Callers are served in turn, so of each other one no more go before it than it has waiting itself: who
asks a hundred times is told to come again, and who asks once beside him is let in.
"""

from __future__ import annotations

from collections import Counter, deque

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
    """The requests that wait for their first text, by caller."""

    def __init__(self, max_wait_s: float = MAX_WAIT_S) -> None:
        self.waiting: Counter[str] = Counter()
        self._max_wait_s = max_wait_s
        self._gaps: deque[float] = deque(maxlen=LATEST)
        self._since = 0.0
        """When the latest one had its first text, or, if later, when somebody began to wait."""

    def come(self, caller: str, now: float) -> None:
        """One begins to wait."""
        if not self.waiting:
            self._since = now
        self.waiting[caller] += 1

    def served(self, caller: str, now: float) -> None:
        """One has its first text, or its end without any.

        Of one that waited alone nothing is learned: it shows how long one takes, not how many go side by side.
        """
        self.leave(caller)
        if self.waiting:
            self._gaps.append(now - self._since)
        self._since = now

    def leave(self, caller: str) -> None:
        """One went, or failed, before that."""
        self.waiting[caller] -= 1
        self.waiting += Counter()  # whoever has none waiting is forgotten

    def ahead(self, caller: str) -> int:
        """How many go before the next one of this caller."""
        own = self.waiting[caller]
        return own + sum(min(theirs, own + 1) for other, theirs in self.waiting.items() if other != caller)

    def wait_s(self, caller: str, now: float) -> float:
        """How long the next one of this caller is likely to wait for its first text."""
        return self.ahead(caller) * self._gap_s(now)

    def drain_s(self, now: float) -> float:
        """How long until all that wait now are likely to have theirs."""
        return self.waiting.total() * self._gap_s(now)

    def retry_s(self, caller: str, now: float) -> float | None:
        """In how many seconds there is likely to be room again; None while there is."""
        ahead = self.ahead(caller)
        if ahead < FEW:
            return None
        over = self.wait_s(caller, now) - self._max_wait_s
        if over <= 0 and (ahead < UNKNOWN or len(self._gaps) >= FEW):
            return None
        return min(max(over, 1.0), MAX_RETRY_S)

    def _gap_s(self, now: float) -> float:
        """From one first text to the next. The longer nothing has happened, the longer."""
        total, count, silence = sum(self._gaps), len(self._gaps), now - self._since
        return max(total / count if count else 0.0, (total + silence) / (count + 1))
