"""The connection beside a further path: by it the ends wake each other and notice that the other is gone.

A sleeper is woken by a pong that nobody asked for, sealed with the connection's own keys: it is a frame like any other,
and who receives it reads it or lets it lie. Belongs to the thread that owns the hot link. The peer is a member and may
still send anything here: what is taken from it is bounded, and what does not belong here is its end.
"""

from __future__ import annotations

import socket

from mlxcel_nb.errors import WireError
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.wire.frames import PING_BYTES, Kind

TRIAL_BYTES = 64 << 10
"""What may come here while a path is tried: one message about it, and calls."""

_WAKE = bytes(PING_BYTES)


class Bell:
    """The connection of `link`, which uses it for nothing else once the link has moved to the further path.

    Until then what comes here is kept for the link, which shares the reader.
    """

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
        """Read once; whether the peer is still there. Where more has come than that, a poll says so."""
        if self._gone:
            return False
        try:
            if count := self._sock.recv_into(self._reader.room()):
                self._reader.received(count)
                self._look()
            else:
                self._gone = True
        except BlockingIOError:
            pass
        except WireError as error:
            self._gone, self.why = True, error.cause
        except OSError as error:
            self._gone, self.why = True, error.strerror or str(error)  # the line says that it is a reset
        return not self._gone

    def _look(self) -> None:
        if self._link.reader is self._reader:  # the link has not moved: it reads this
            if self._reader.bytes_pending > TRIAL_BYTES:
                raise WireError("more came than belongs beside a path that is being tried")
            return
        for frame in self._reader.frames():
            if frame.kind is not Kind.PONG:
                raise WireError(f"a {frame.kind.name.lower()} frame beside a further path")
