"""How much of a prompt is read between two tokens of those who are being answered. Pure: it is told how long steps
took.

Reading stands in the way of decoding, and a text that stutters is hard to read. So each decode step earns tokens of
prompt, which chunks spend: over a round of all groups as many as take about as long as the round, times `gap` - 1. How
many those are is found by looking: after a chunk that took twice its time comes one of half the length. That settles
where a chunk takes its time, whatever a step costs beside its tokens.

Where many wait for few, they count for more, and those few for a little less: a round earns more by the square of the
number that want to be read, divided by the number that decode. One prompt among any number of texts gets no more than
its share; of a burst of requests all are soon answered together, which is what batches are for.
"""

from __future__ import annotations

import statistics
from collections import deque

LEAST = 4
"""Tokens; on a CPU a chunk of so many takes little longer than a decode step: the weights are read for both."""

START = 8
"""Tokens, before anything has been measured."""

REMEMBERED = 9
"""Decode steps whose median is their time: one that was disturbed does not count."""


class Pace:
    """Chunk lengths of one instance.

    Args:
        gap: see `Limits`.
        most: tokens of a chunk.
    """

    def __init__(self, gap: float, most: int) -> None:
        self._gap = gap
        self._most = most
        self._least = min(LEAST, most)
        self._length = float(min(START, most))
        self._decodes: deque[float] = deque(maxlen=REMEMBERED)
        self._credit = 0

    @property
    def length(self) -> int:
        """Tokens that a round earns."""
        return int(self._length)

    @property
    def allowed(self) -> int:
        """Tokens that the next chunk may have; 0 when decode steps come first."""
        return self._credit if self._credit >= self.length else 0

    def earn(self, groups: int, decoding: int, wanting: int) -> None:
        """A step of one of `groups` groups has been sent, with `decoding` sequences in all, while `wanting` wait."""
        round_earns = min(self._most, self.length * max(1, wanting * wanting // decoding))
        self._credit = min(round_earns, self._credit - (-round_earns // groups))

    def spend(self, tokens: int) -> None:
        """A chunk of so many tokens has been sent. A short one takes nearly as much time as the usual length."""
        self._credit = max(0, self._credit - max(tokens, self.length))

    def rest(self) -> None:
        """Nothing decodes, or all is over: what was earned is of no use."""
        self._credit = 0

    def decoded(self, seconds: float) -> None:
        """A step of one group took so long."""
        self._decodes.append(seconds)

    def read(self, tokens: int, seconds: float, groups: int) -> None:
        """A chunk between the steps of `groups` decoding groups took so long.

        Shorter ones than usual, the ends of prompts, tell little and are passed over.
        """
        if not self._decodes or seconds <= 0 or 2 * tokens < self._length:
            return
        meant = (self._gap - 1) * groups * statistics.median(self._decodes)
        wanted = tokens * meant / seconds
        self._length = max(self._least, min(self._most, 2 * self._length, max(self._length / 2, wanted)))
