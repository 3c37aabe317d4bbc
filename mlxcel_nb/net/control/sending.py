"""The sending half of a link on a loop: frames that wait for the socket, urgent ones before the others.

Belongs to one `ControlLink`. A frame gets its number and its seal at the moment it is given to the kernel, so that a
ping may overtake megabytes that were queued before it; the kernel itself is told to keep little. Nothing here decides
how much may wait: the owner looks at `queued_bytes`.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import socket
import struct
import sys
import termios

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.wire.frames import Kind, Sealer

URGENT = frozenset({Kind.PING, Kind.PONG, Kind.CREDIT})
"""Small, and somebody waits for them; the order among the others stays."""

KERNEL_UNSENT_BYTES = 128 * 1024
"""What the kernel takes beyond what is on its way: it keeps a link busy, and an urgent frame does not wait long."""

FRAME_COST = 64
"""What a waiting frame takes beside its payload."""

_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25 if sys.platform == "linux" else 0x201)
_NWRITE = 0x1024
"""macOS: SO_NWRITE, bytes that the kernel holds for sending; Python has no name for it."""


class Sending:
    """What is on its way to one peer."""

    def __init__(self, sock: socket.socket, sealer: Sealer) -> None:
        self._sock = sock
        self._sealer = sealer
        self._rest = memoryview(b"")
        self._rest_kind: Kind | None = None
        self._urgent: collections.deque[tuple[Kind, int, bytes]] = collections.deque()
        self._ordinary: collections.deque[tuple[Kind, int, bytes]] = collections.deque()
        self._deaf = False
        self._acknowledged = 0
        self.queued_bytes = 0
        self.sent_bytes = 0
        with contextlib.suppress(OSError):  # the near end of a shaped link is no TCP socket
            sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, KERNEL_UNSENT_BYTES)

    @property
    def waiting(self) -> bool:
        """Whether anything waits for the kernel."""
        return bool(self._rest or self._urgent or self._ordinary)

    def count(self, kind: Kind) -> int:
        """Frames of an urgent `kind` that wait, the one half sent among them."""
        return sum(each is kind for each, _, _ in self._urgent) + (self._rest_kind is kind and bool(self._rest))

    def put(self, kind: Kind, channel: int, *parts: bytes | memoryview) -> None:
        """Send a frame, or keep it until the kernel takes it."""
        if self.waiting:
            payload = b"".join(parts)
            self.queued_bytes += len(payload) + FRAME_COST
            (self._urgent if kind in URGENT else self._ordinary).append((kind, channel, payload))
        else:
            self._start(kind, self._sealer.seal(kind, channel, *parts))

    def flush(self) -> None:
        """Give the kernel what it takes now."""
        if self._rest:
            self._rest = self._rest[self._push(self._rest) :]
        while not self._rest and (self._urgent or self._ordinary):
            kind, channel, payload = (self._urgent or self._ordinary).popleft()
            self.queued_bytes -= len(payload) + FRAME_COST
            self._start(kind, self._sealer.seal(kind, channel, payload))

    def farewell(self, reason: str) -> None:
        """What waits and a close frame, as far as the kernel takes them at once."""
        with contextlib.suppress(MlxcelError):
            self.flush()
            if not self.waiting:
                self._start(Kind.CLOSE, self._sealer.seal_close(reason))

    def clear(self) -> None:
        """Nobody waits for any of it any more."""
        self._urgent.clear()
        self._ordinary.clear()
        self._rest = memoryview(b"")
        self.queued_bytes = 0

    def moved(self) -> bool:
        """Whether the peer has acknowledged more since this was asked last.

        While something waits here, the peer's buffer is full, and it acknowledges more only as its process reads.
        """
        before, self._acknowledged = self._acknowledged, self.sent_bytes - self._unacknowledged()
        return self._acknowledged > before

    def _start(self, kind: Kind, sealed: memoryview) -> None:
        sent = self._push(sealed)
        self._rest_kind = kind
        self._rest = memoryview(bytes(sealed[sent:]))  # a copy: the sealer's next frame overwrites it

    def _push(self, data: memoryview) -> int:
        """Give the kernel what it takes of `data`.

        A connection that takes no more is not over yet: the peer's last words may still be there to be read, and
        the end will be read behind them.
        """
        if self._deaf:
            return len(data)
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            self._deaf = True
            return len(data)
        self.sent_bytes += sent
        return sent

    def _unacknowledged(self) -> int:
        """Bytes in the kernel that the peer's has not confirmed; 0 where that cannot be asked."""
        try:
            if sys.platform == "darwin":
                return self._sock.getsockopt(socket.SOL_SOCKET, _NWRITE)
            answer = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return int(struct.unpack("i", answer)[0])
