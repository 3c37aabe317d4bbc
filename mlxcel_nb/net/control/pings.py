"""The pings of one link that are under way, and what they have measured. No I/O; belongs to the link's loop."""

from __future__ import annotations

import asyncio
import collections
import struct
from dataclasses import dataclass

from mlxcel_nb.errors import MlxcelError, WireError
from mlxcel_nb.wire.frames import MAX_UNANSWERED_PINGS, PING_BYTES

RTT_SAMPLES = 15

_ID = struct.Struct("!Q")
assert _ID.size == PING_BYTES


@dataclass(frozen=True, slots=True)
class _Ping:
    """One without its pong; `answer` is for whoever waits for it."""

    sent: float
    filler: bytes
    answer: asyncio.Future[float] | None


class Pings:
    """Pairs pongs with pings.

    Args:
        node: the peer, for error texts.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._count = 0
        self._under_way: dict[bytes, _Ping] = {}
        self._round_trips: collections.deque[float] = collections.deque(maxlen=RTT_SAMPLES)

    @property
    def full(self) -> bool:
        """Whether as many are unanswered as the wire allows."""
        return len(self._under_way) >= MAX_UNANSWERED_PINGS

    @property
    def least_s(self) -> float | None:
        """Of recent round trips without filler; None before the first.

        The least, because the others say how busy the two ends were, not how long the path is.
        """
        return min(self._round_trips, default=None)

    def begin(self, now: float, filler: bytes = b"", answer: asyncio.Future[float] | None = None) -> bytes:
        """The eight bytes that the ping begins with."""
        self._count += 1
        ping_id = _ID.pack(self._count)
        self._under_way[ping_id] = _Ping(now, filler, answer)
        return ping_id

    def pong(self, now: float, payload: memoryview) -> None:
        """A pong came: its ping's `answer` gets the round trip in seconds, or `WireError` when it is no echo."""
        ping = self._under_way.pop(bytes(payload[:PING_BYTES]), None)
        if ping is None:
            # It echoes nothing that was sent: whoever has waited longest has been answered wrongly.
            waiting = (ping.answer for ping in self._under_way.values())
            self._settle(next((answer for answer in waiting if answer and not answer.done()), None), self._differs())
        elif payload[PING_BYTES:] != ping.filler:
            self._settle(ping.answer, self._differs())
        else:
            if not ping.filler:
                self._round_trips.append(now - ping.sent)
            self._settle(ping.answer, now - ping.sent)

    def end(self, error: MlxcelError) -> None:
        """No pong will come any more."""
        for ping in self._under_way.values():
            self._settle(ping.answer, error)
        self._under_way.clear()

    def _differs(self) -> WireError:
        return WireError("pong differs from its ping", node=self._node)

    @staticmethod
    def _settle(answer: asyncio.Future[float] | None, result: float | MlxcelError) -> None:
        if answer is None or answer.done():
            return
        if isinstance(result, MlxcelError):
            answer.set_exception(result)
        else:
            answer.set_result(result)
