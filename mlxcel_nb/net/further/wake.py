"""One descriptor to poll for a stream that is woken by several things. For the thread that owns the stream."""

from __future__ import annotations

import contextlib
import os
import select


class Wake:
    """Readable when one of `descriptors` is, or `at_once` has been called.

    Raises:
        OSError: this process has no descriptors left.
    """

    def __init__(self, *descriptors: int) -> None:
        with contextlib.ExitStack() as undo:
            self._wake = undo.enter_context(select.epoll())
            self._set = False
            # Something may come between a stream's last look and the poll: the stream sees it, and says so by this.
            self._came = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._came)
            for descriptor in (*descriptors, self._came):
                self._wake.register(descriptor, select.EPOLLIN)
            undo.pop_all()

    def fileno(self) -> int:
        return self._wake.fileno()

    def at_once(self) -> None:
        """The next poll shall not sleep."""
        if not self._set:
            os.eventfd_write(self._came, 1)
            self._set = True

    def settle(self) -> None:
        """Take `at_once` back."""
        if self._set:
            os.eventfd_read(self._came)
            self._set = False

    @property
    def closed(self) -> bool:
        return self._wake.closed

    def close(self) -> None:
        """Twice is once."""
        if not self._wake.closed:
            self._wake.close()
            os.close(self._came)
