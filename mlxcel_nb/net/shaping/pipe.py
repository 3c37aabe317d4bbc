"""One direction of a shaped link: what was put in comes out later, at a rate, in order. Pure: times go in.

The model. A link sends one byte after the other: a piece leaves when those before it have left, which takes its size
over the rate, and arrives `latency_s` after its last byte has left. Segments of `SEGMENT` bytes are lost by chance.
TCP delivers in order, so a lost one holds up all that is behind it, for as long as it takes to be sent again:

* something sent after it arrives, and tells the sender (RFC 8985): one round trip after that arrival;
* nothing is sent after it: the sender probes the tail, two round trips and `TAIL_S` after it was sent;
* what is sent again may be lost again: each time the pause before the next try doubles, from `RETRY_S`.

What TCP's congestion control would make of a loss beyond this, a lower rate for a while, is left out.

Belongs to one thread, that of `net.shaping.relay`. A pipe holds the link's bandwidth-delay product and `BUFFER_BYTES`,
whatever the sender wants: then it takes no more, and the sender's own socket fills up.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable

from mlxcel_nb.cluster.shape import LinkShape

SEGMENT = 1448
"""Payload of a TCP segment on Ethernet, with time stamps."""

PIECE_BYTES, PIECE_S = 64 << 10, 1e-3
"""What is moved at once: as much as is sent in a millisecond, between one segment and this."""

BUFFER_BYTES = 256 << 10
"""Of the sender's socket: what waits for its turn to be sent."""

UNLIMITED_BYTES, MOST_BYTES = 16 << 20, 64 << 20
"""What a pipe without a rate holds, and any pipe at most. More on its way than this waits at the sender."""

TAIL_S = 0.2
"""Linux's allowance for a delayed acknowledgement when it probes for the loss of the only segment on its way."""

RETRY_S = 0.2
"""Linux's least time-out for sending again."""


class _Piece:
    """Bytes on their way; none of them mark the end of the stream."""

    __slots__ = ("data", "due", "tail_lost")

    def __init__(self, data: memoryview, due: float) -> None:
        self.data = data
        self.due = due
        self.tail_lost = False
        """Lost, and nothing behind it has told the sender so yet."""


class Pipe:
    """What is on its way from one end to the other.

    Args:
        draw: numbers from 0 to 1 by chance, for losses.
    """

    def __init__(self, shape: LinkShape, draw: Callable[[], float] = random.random) -> None:
        self.latency_s = shape.latency_s
        self._rate = shape.bytes_per_s or math.inf
        self._loss = shape.loss
        self._draw = draw
        self._pieces: collections.deque[_Piece] = collections.deque()
        self._held = 0
        self._free_at = 0.0
        self._capacity = UNLIMITED_BYTES
        self.piece_bytes = PIECE_BYTES
        if shape.bytes_per_s is not None:
            trips = 3 if shape.loss else 1  # behind a lost piece a round trip's worth waits to be delivered
            self._capacity = min(MOST_BYTES, BUFFER_BYTES + int(self._rate * self.latency_s * trips))
            self.piece_bytes = min(PIECE_BYTES, max(SEGMENT, int(self._rate * PIECE_S)))

    @property
    def full(self) -> bool:
        """Whether nothing may be put in now."""
        return self._held >= self._capacity

    @property
    def due(self) -> float:
        """When the first piece comes out; infinite while there is none."""
        return self._pieces[0].due if self._pieces else math.inf

    def put(self, now: float, data: bytes) -> None:
        """Send `data`, at most `piece_bytes`; no bytes at all are the end of the stream."""
        self._free_at = max(now, self._free_at) + len(data) / self._rate
        piece = _Piece(memoryview(data), self._free_at + self.latency_s)
        if self._pieces and self._pieces[-1].tail_lost:
            last = self._pieces[-1]
            last.due = min(last.due, piece.due + 2 * self.latency_s)
            last.tail_lost = False
        if self._loss and data:
            self._lose(piece)
        self._pieces.append(piece)
        self._held += len(data)

    def head(self) -> memoryview:
        """The rest of the first piece."""
        return self._pieces[0].data

    def took(self, count: int) -> None:
        """`count` bytes of the first piece have been delivered."""
        piece = self._pieces[0]
        self._held -= count
        if count < len(piece.data):
            piece.data = piece.data[count:]
            return
        self._pieces.popleft()

    def clear(self) -> None:
        """Nothing of this is wanted any more."""
        self._pieces.clear()
        self._held = 0

    def _lose(self, piece: _Piece) -> None:
        """Perhaps delay `piece` as a loss of one of its segments does."""
        segments = math.ceil(len(piece.data) / SEGMENT)
        if self._draw() >= 1 - (1 - self._loss) ** segments:
            return
        trip = 2 * self.latency_s
        if int(self._draw() * segments) < segments - 1:
            piece.due += trip
        else:
            piece.due += 2 * trip + TAIL_S
            piece.tail_lost = True
        pause = RETRY_S
        while self._draw() < self._loss:
            piece.due += pause + trip
            piece.tail_lost = False
            pause *= 2
