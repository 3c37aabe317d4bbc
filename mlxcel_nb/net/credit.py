"""Credits: how many frames of a channel may be on their way unread. Pure.

Counts frames of kinds 4 to 6, each direction and channel for itself. One ledger serves one end of one connection.
"""

from __future__ import annotations

from mlxcel_nb.errors import WireError

INITIAL = 64
"""Frames a channel may carry before the first grant."""

GRANT = 32
"""Granted together, when that many have been used up: half of what a channel starts with, so neither end idles."""

MAX_CHANNELS = 1024
"""Channels one peer may make this side keep count of."""

MAX_CREDIT = 1 << 31


class CreditLedger:
    """What this end may still send, and what it owes the peer in grants, by channel."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self._used: dict[int, int] = {}

    def left(self, channel: int) -> int:
        """Frames that may be sent on `channel` now."""
        return self._left.get(channel, INITIAL)

    def spend(self, channel: int) -> bool:
        """Take the credit for one frame, if there is any."""
        left = self.left(channel)
        if not left:
            return False
        self._left[channel] = left - 1
        return True

    def granted(self, channel: int, count: int) -> None:
        """The peer lets `count` more frames pass."""
        if channel not in self._left and len(self._left) >= MAX_CHANNELS:
            raise WireError(f"credits for more than {MAX_CHANNELS} channels")
        self._left[channel] = min(MAX_CREDIT, self.left(channel) + count)

    def consumed(self, channel: int) -> int:
        """One frame from the peer has been dealt with; returns what is to be granted now, mostly 0."""
        if channel not in self._used and len(self._used) >= MAX_CHANNELS:
            raise WireError(f"frames on more than {MAX_CHANNELS} channels")
        used = self._used.get(channel, 0) + 1
        self._used[channel] = used % GRANT
        return used if used == GRANT else 0
