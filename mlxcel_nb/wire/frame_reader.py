"""From a byte stream to frames, without I/O, however the bytes arrive.

A connection has one reader, on the thread that owns its receiving side. It believes a length no further than what has
come: memory grows with the bytes, not with a header's claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mlxcel_nb.errors import FrameError
from mlxcel_nb.wire.frames import FIRST_BUFFER, LENGTH_BYTES, TAG_BYTES, Frame, Kind, Opener, room_for

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

READ_BYTES = 256 << 10
"""What is asked of a socket at once, unless a larger frame has begun."""

_REKEY = Kind.REKEY


class FrameReader:
    """Cuts a byte stream into frames, however the bytes arrive.

    Feed it, or without a copy receive into `get_buffer` and say `received`. Space grows with what has arrived.
    """

    def __init__(self, opener: Opener, leftover: bytes = b"") -> None:
        self.opener = opener
        self._buffer = memoryview(bytearray(FIRST_BUFFER))
        self._start = 0
        self._end = 0
        self.total = 0
        """Bytes received so far; other threads may look at it for a sign of life."""
        if leftover:
            self.feed(leftover)

    def feed(self, data: ReadableBuffer) -> None:
        view = memoryview(data)
        self.get_buffer(len(view))[: len(view)] = view
        self.received(len(view))

    def get_buffer(self, size: int = 1) -> memoryview:
        """Room for at least `size` bytes behind those that wait."""
        waiting = self._end - self._start
        if waiting == 0:
            self._start = self._end = 0
        if len(self._buffer) - self._end < size:
            old = self._buffer[self._start : self._end]
            if len(self._buffer) - waiting < max(size, len(self._buffer) // 2):
                self._buffer = memoryview(bytearray(room_for(max(waiting + size, 2 * len(self._buffer)))))
            self._buffer[:waiting] = old
            self._start, self._end = 0, waiting
        return self._buffer[self._end :]

    def room(self) -> memoryview:
        """Where to receive next: no further than the header behind a large frame that has begun, so that nothing of
        what follows has to be moved to the front of the buffer.
        """
        waiting = self._end - self._start
        size = READ_BYTES
        if waiting > LENGTH_BYTES:
            size = min(self.missing + LENGTH_BYTES, max(READ_BYTES, 2 * waiting))
        return self.get_buffer(size)[:size]

    def received(self, count: int) -> None:
        """`count` bytes have been written to the front of `get_buffer`'s view."""
        self._end += count
        self.total += count

    def frames(self) -> Iterator[Frame]:
        """Every whole frame that has arrived; each one's payload is valid until the next is taken."""
        while (frame := self.next_frame()) is not None:
            yield frame

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None until more bytes arrive. Rekey frames are dealt with, not returned."""
        while (plain := self.next_plain()) is not None:
            frame = self.opener.frame(plain)
            if frame.kind is not _REKEY:
                return frame
        return None

    def next_plain(self, landing: Callable[[int], memoryview | None] | None = None) -> memoryview | None:
        """The next whole frame's plaintext, for a caller that gives it to the opener's `frame` unless it knows better.

        Args:
            landing: asked where a plaintext of so many bytes shall go; None leaves it to the opener.
        """
        begin = self._start + LENGTH_BYTES
        if begin > self._end:
            return None
        header = self._buffer[self._start : begin]
        length = self.opener.frame_length(header)
        end = begin + length
        if end > self._end:
            return None
        self._start = end
        into = landing(length - TAG_BYTES) if landing is not None else None
        return self.opener.decrypt(header, self._buffer[begin:end], into)

    @property
    def missing(self) -> int:
        """Bytes still needed before the next header or frame is whole; 0 when a frame is ready."""
        waiting = self._end - self._start
        if waiting < LENGTH_BYTES:
            return LENGTH_BYTES - waiting
        length = self.opener.frame_length(self._buffer[self._start : self._start + LENGTH_BYTES])
        return max(0, LENGTH_BYTES + length - waiting)

    @property
    def bytes_pending(self) -> int:
        """Bytes that wait for the rest of their frame; while there are any, the rest is due within 10 s."""
        return self._end - self._start

    def receive_eof(self) -> None:
        """The stream ended: an error unless the peer's close frame was the last thing in it."""
        if not self.opener.closed:
            within = "within a frame" if self.bytes_pending else "without a close frame"
            raise FrameError(f"the connection ended {within}")
