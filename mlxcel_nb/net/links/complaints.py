"""When to log once more that somebody cannot be let in: pauses that grow, so that one peer with an old secret does not
fill a log in a night. Pure; one owner, on the listener's loop. Trusts nobody: what it keeps is bounded.
"""

from __future__ import annotations

FIRST_S = 10.0
"""Between the first two lines of one address and kind of failure; each pause is twice the one before."""

LONGEST_S = 3600.0
"""The longest pause. What has not happened for as long begins anew."""

MAX_KEPT = 1024
"""Addresses and kinds that are remembered; all are forgotten when there would be more."""


class Complaints:
    """What was logged of whom."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], tuple[float, float, float]] = {}
        """By address and kind: when it happened last, when the next line is due, and the pause after that."""

    def due(self, ip: str, kind: str, now: float) -> bool:
        """Whether to log now that it happened; `now` in seconds, of any clock that only goes on."""
        last, at, pause = self._kept.get((ip, kind), (now, now, FIRST_S))
        if now - last >= LONGEST_S:
            at, pause = now, FIRST_S
        due = now >= at
        if due:
            at, pause = now + pause, min(2 * pause, LONGEST_S)
        if len(self._kept) >= MAX_KEPT and (ip, kind) not in self._kept:
            self._kept.clear()
        self._kept[ip, kind] = (now, at, pause)
        return due

    def forget(self, ip: str) -> None:
        """Somebody of this address was let in: what goes wrong there next is news."""
        for key in [key for key in self._kept if key[0] == ip]:
            del self._kept[key]


class Seldom:
    """One thing that is told at most once in `pause_s` seconds, however often it happens."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._next = float("-inf")

    def due(self, now: float) -> bool:
        """Whether to tell now that it happened; `now` as for `Complaints`."""
        if now < self._next:
            return False
        self._next = now + self._pause_s
        return True
