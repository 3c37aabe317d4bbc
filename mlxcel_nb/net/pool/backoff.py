"""How long to wait before trying again: delays that grow, by chance a little apart, up to a cap. Pure but for chance.

Peers that lost each other at the same moment would else knock at the same moment, again and again. One owner.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_S = 0.1
"""Longer than a round trip, shorter than anybody waits."""

CAP_S = 15.0
"""A peer that comes back is found within this."""

FACTOR = 2.0

UNSEEN_AFTER = 4
"""Failed attempts before a peer is said to be missing: nodes that start together find each other before that."""


class Backoff:
    """The delays of one row of attempts.

    Args:
        attempts: how many delays there are; None for no end.
        chance: draws from [0, 1).
    """

    def __init__(
        self,
        first_s: float = FIRST_S,
        cap_s: float = CAP_S,
        *,
        attempts: int | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._attempts = attempts
        self._chance = chance
        self.failed = 0
        """Attempts that have failed since the last success."""

    def next_s(self) -> float | None:
        """Seconds to wait after an attempt that failed; None when it was the last one.

        Each is drawn from the upper half of its span, and the spans double, so no delay is shorter than the one before
        until the cap is reached.
        """
        self.failed += 1
        if self._attempts is not None and self.failed > self._attempts:
            return None
        span = min(self._cap_s, self._first_s * FACTOR ** min(self.failed - 1, 64))
        return span * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        """An attempt has succeeded: the next row begins small."""
        self.failed = 0
