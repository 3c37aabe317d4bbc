"""How much of a prompt is read between two tokens of those who are being answered. Pure: it is told how long steps
took.

Reading stands in the way of decoding, and a text that stutters is hard to read. So a round of all groups may take
`gap` times what it takes when nothing is read. How many tokens that are is found by looking: after one that took twice
its time comes half as much, after one that took half its time a little more. That settles where steps take their time,
whatever they cost beside their tokens.

Where steps are mixed, each reads along what it may. Else chunks have steps of their own, which decode steps earn: over
a round of all groups as many tokens as take about as long as the round, times `gap` - 1.

Where many wait for few they count for more: with w that wait and d that decode, a round reads w (w - 1)^2 / d times as
much. So one prompt gets no more than this share of any number of texts, nor do two beside two; of a burst of requests
all are soon answered together, which is what batches are for, and the first of them has to wait for it. Where steps are
mixed, who has just begun is of the burst and does not count as decoding: it makes a token in each of these steps, and
so counts soon.
"""

from __future__ import annotations

import statistics
from collections import deque

LEAST = 4
"""Tokens that a step reads at least: on a CPU so many take little longer than none, the weights are read for both."""

START = 8
"""Tokens that it reads before anything has been measured."""

LOOKS = 2
"""Decode steps before any reads along, when so many decode as have not been seen."""

SETTLED = 16
"""Tokens after which a text is under way, and is not to stutter for others."""

GROWTH = 0.25
"""Of the way to a longer length that one step shows. Steps are uneven: a quick one says little, a slow one is felt."""

REMEMBERED = 9
"""Decode steps whose median is their time: one that was disturbed does not count."""


class Pace:
    """Chunk lengths of one instance.

    Args:
        gap: `Limits.slowdown`. mixed: see `Limits`.
        most: tokens that a step reads.
    """

    def __init__(self, gap: float, most: int, *, mixed: bool = False) -> None:
        self._gap = gap
        self._most = most
        self._mixed = mixed
        self._least = min(LEAST, most)
        self._length = float(min(START, most))
        self._decodes: deque[float] = deque(maxlen=REMEMBERED)
        self._looked_at = 0  # sequences that decoded in the latest step that read nothing
        self._looks = 0  # such steps since so many did
        self._passed_over = 0  # results of such steps that have yet to be passed over
        self._credit = 0

    @property
    def length(self) -> int:
        """Tokens that one prompt gets in a round of one group."""
        return round(self._length)

    def allowed(self, decoding: int, wanting: int, settled: int) -> int:
        """Tokens that the next step may read while `decoding` sequences decode and `wanting` wait; 0: they come first.

        Of those that decode, `settled` have made `SETTLED` tokens. What a step takes that reads nothing is looked at
        anew whenever twice as many decode as when it was last seen, or half as many: in two steps, of which the first
        has to put the rows of its batch together.
        """
        if self._mixed and not settled:
            return self._most
        if self._mixed:
            looking = self._stale(decoding) or self._looks < LOOKS
            return 0 if looking else self._round(settled, wanting)
        return self._credit if self.earned else 0

    @property
    def earned(self) -> bool:
        """Whether those who decode have made tokens since the last chunk, for another one by itself."""
        return self._credit >= self.length

    def _round(self, decoding: int, wanting: int) -> int:
        return min(self._most, self.length * max(1, wanting * (wanting - 1) ** 2 // decoding))

    def _stale(self, decoding: int) -> bool:
        return decoding > 2 * self._looked_at or 2 * decoding <= self._looked_at

    def earn(self, groups: int, decoding: int, wanting: int) -> None:
        """A step of one of `groups` groups has been sent that reads nothing, while `decoding` and `wanting` do so."""
        if self._stale(decoding):
            self._decodes.clear()
            self._looks, self._passed_over = 0, LOOKS - 1
        self._looks += 1
        self._looked_at = decoding
        earned = self._round(decoding, wanting)
        self._credit = min(earned, self._credit - (-earned // groups))

    def spend(self, tokens: int) -> None:
        """A chunk of so many tokens has been sent. A short one takes nearly as much time as the usual length."""
        self._credit = max(0, self._credit - max(tokens, self.length))

    def rest(self) -> None:
        """Nothing decodes, or all is over: what was earned is of no use."""
        self._credit = 0

    def decoded(self, seconds: float) -> None:
        """A step of one group took so long that read nothing."""
        if self._passed_over:
            self._passed_over -= 1
        else:
            self._decodes.append(seconds)

    def read(self, tokens: int, seconds: float, groups: int) -> None:
        """A step that read so much while `groups` groups decoded took so long.

        Shorter ones than usual, the ends of prompts, tell little and are passed over.
        """
        if not self._decodes or seconds <= 0 or 2 * tokens < self._length:
            return
        alone = statistics.median(self._decodes)
        meant = self._gap * alone if self._mixed else (self._gap - 1) * alone * groups
        beside = alone if self._mixed else 0.0
        if seconds <= meant:  # all of it grows with the tokens, for all that is known
            wanted = tokens * meant / seconds
        else:
            wanted = tokens * (meant - beside) / (seconds - beside)
        wanted = max(self._least, min(self._most, 2 * self._length, max(self._length / 2, wanted)))
        self._length += (wanted - self._length) * (1.0 if wanted < self._length else GROWTH)
