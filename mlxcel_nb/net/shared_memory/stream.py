"""A byte stream through memory that two processes of one host share, which a hot link can use in place of its socket.

Each end has made one of two rings and writes to it. While both ends poll, no byte costs a system call; an end that
sleeps is woken by the TCP connection beside it, whose end is also the end of this stream. It has the few methods of a
non-blocking socket that `HotLink` calls, and carries frames that are sealed already. Belongs to one thread.
"""

from __future__ import annotations

import contextlib
import errno

from mlxcel_nb.net.further.bell import Bell
from mlxcel_nb.net.further.wake import Wake
from mlxcel_nb.net.shared_memory.ring import Reader, Writer
from mlxcel_nb.net.shared_memory.segment import Segment


class SharedMemoryStream:
    """Ordered bytes to and from the process that made `theirs`. Owns both segments once it is made.

    Raises:
        OSError: this process has no descriptors left.
    """

    def __init__(self, ours: Segment, theirs: Segment, bell: Bell) -> None:
        self._wake = Wake(bell.fileno())  # first, for it may fail
        self._segments = (ours, theirs)
        self._writer, self._reader, self._bell = Writer(ours.buffer), Reader(theirs.buffer), bell
        self._armed = False  # the last poll wished to be woken
        self._full = False  # the last `send` found no room

    def send(self, data: memoryview) -> int:
        """Take some of `data`; how many bytes."""
        count = self._writer.put(data)
        if not count:
            self._full = True
            raise BlockingIOError(errno.EAGAIN, "shared memory is full")
        self._full = False
        if self._writer.reader_sleeps:
            self._bell.ring()
        return count

    def recv_into(self, buffer: memoryview) -> int:
        """Bytes put into `buffer`; 0 when the peer is gone and everything it sent has been read."""
        count = self._reader.take(buffer)
        if self._armed:
            self._armed = False
            self._reader.awake()
            if not count and not self._bell.hear():
                count = self._reader.take(buffer)  # what it said last
                if not count and self._bell.why:
                    raise OSError(errno.ECONNRESET, self._bell.why)
                return count
        if not count:
            raise BlockingIOError(errno.EAGAIN, "nothing has come")
        if self._reader.writer_sleeps:
            with contextlib.suppress(OSError):  # the peer is gone: what it said before is read to its end first
                self._bell.ring()
        return count

    def recv(self, count: int) -> bytes:
        """As `recv_into`, in memory of its own."""
        buffer = bytearray(count)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def fileno(self) -> int:
        """What to poll for input, also while `send` finds no room; asked for anew before every poll."""
        self._wake.settle()
        self._armed = True
        self._reader.wish()
        if self._full:
            self._writer.wish()
        there = self._bell.hear()  # or an old call would wake the poll
        if not there or not self._reader.empty or (self._full and self._writer.room):
            self._wake.at_once()
        return self._wake.fileno()

    def flush(self, _within_s: float) -> bool:
        """What was sent is in the peer's reach at once."""
        return True

    def shutdown(self, _how: int) -> None:
        """No more will be sent: what was stays readable, and then the peer reads the end."""
        with contextlib.suppress(OSError):
            self._bell.shut()

    def close(self) -> None:
        """Unmap both rings; twice is once. The connection belongs to the link."""
        if self._wake.closed:
            return
        self._wake.close()
        self._writer.close()
        self._reader.close()
        for segment in self._segments:
            segment.close()
