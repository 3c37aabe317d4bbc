"""A way to break another thread's wait on sockets.

A thread that blocks on a hot link looks at nothing else. Its node's other threads hold the `Interrupt` it polls
beside the sockets: a cancel or the death of a peer, learned elsewhere, ends the wait at once. Any thread may `set`.
"""

from __future__ import annotations

import contextlib
import socket
import threading


class Interrupt:
    """An exception to be raised in the thread that waits; the first one set holds until `clear`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self.pending: BaseException | None = None

    def fileno(self) -> int:
        """Readable while an exception is set."""
        return self._reader.fileno()

    def set(self, error: BaseException) -> None:
        """Raise `error` in the waiter, now or when it next waits."""
        with self._lock:
            if self.pending is None:
                self.pending = error
                with contextlib.suppress(OSError):  # closed: nobody waits any more
                    self._writer.send(b"!")

    def check(self) -> None:
        """Raise what is set, if anything is."""
        if self.pending is not None:
            raise self.pending.with_traceback(None)

    def clear(self) -> None:
        """Forget what was set: the next wait is a new one."""
        with self._lock:
            self.pending = None
            with contextlib.suppress(OSError):
                while self._reader.recv(64):
                    pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
