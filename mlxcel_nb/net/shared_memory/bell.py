"""How the ends of a ring in shared memory wake each other, and notice that the other is gone: by their connection.

A sleeper is woken by a pong that nobody asked for, sealed with the connection's own keys: it is a frame like any other,
and who receives it reads it or lets it lie. Belongs to the thread that owns the hot link.
"""

from __future__ import annotations

import socket

from mlxcel_nb.errors import WireError
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.wire.frames import PING_BYTES, Kind

_WAKE = bytes(PING_BYTES)


class Bell:
    """The connection of `link`, which uses it for nothing else once the link has moved to the ring."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sock = link.sock
        self._sealer, self._reader = link.sealer, link.reader
        self._tail = memoryview(b"")
        self.why = ""
        """Why the peer is gone, where it is not for the connection's plain end."""
        self._gone = False

    def fileno(self) -> int:
        return self._sock.fileno()

    def ring(self) -> None:
        """Wake the peer. Where the socket takes no more, what it has taken wakes it.

        Raises:
            OSError: the connection has ended.
        """
        try:
            while True:
                if not self._tail:
                    self._tail = self._sealer.seal(Kind.PONG, 0, _WAKE)
                self._tail = self._tail[self._sock.send(self._tail) :]
                if not self._tail:
                    return
        except BlockingIOError:
            return

    def shut(self) -> None:
        """This side says no more; the peer reads the end."""
        self._sock.shutdown(socket.SHUT_WR)

    def hear(self) -> bool:
        """Take what has come; whether the peer is still there."""
        if self._gone:
            return False
        try:
            while count := self._sock.recv_into(self._reader.room()):
                self._reader.received(count)
            self._gone = True
        except BlockingIOError:
            pass
        except OSError as error:
            self._gone, self.why = True, error.strerror or str(error)  # the line says that it is a reset
        if self._link.reader is not self._reader:  # the link has moved, so what comes here is for nobody else
            self._open()
        return not self._gone

    def _open(self) -> None:
        try:
            for frame in self._reader.frames():
                if frame.kind is not Kind.PONG:
                    raise WireError(f"a {frame.kind.name.lower()} frame beside shared memory")
        except WireError as error:
            self._gone, self.why = True, error.cause
