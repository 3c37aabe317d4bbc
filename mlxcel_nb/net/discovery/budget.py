"""How much work strangers may cause: token buckets, one for all and one for each source. Pure: times go in."""

from __future__ import annotations

import collections


class Budget:
    """Lets `rate` things a second through, and `burst` at once.

    `now` is always a reading of one monotonic clock, in seconds.
    """

    __slots__ = ("_at", "_burst", "_left", "_rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, now

    def take(self, now: float) -> bool:
        """Whether one more may pass."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Sources:
    """A budget for each source address, of the latest `limit` sources: memory stays the same however many come."""

    def __init__(self, rate: float, burst: float, limit: int) -> None:
        self._rate, self._burst, self._limit = rate, burst, limit
        self._budgets: collections.OrderedDict[str, Budget] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._budgets)

    def take(self, source: str, now: float) -> bool:
        """Whether one more from `source` may pass."""
        budget = self._budgets.get(source)
        if budget is None:
            if len(self._budgets) >= self._limit:
                self._budgets.popitem(last=False)
            budget = self._budgets[source] = Budget(self._rate, self._burst, now)
        else:
            self._budgets.move_to_end(source)
        return budget.take(now)
