"""A ring of bytes in memory that two processes share: one writes, one reads, neither calls the system.

| bytes | what | written by |
|---|---|---|
| 64 to 71 | how many bytes have ever been put in | the writer |
| 128 to 135 | how many have ever been taken out | the reader |
| 192 to 199 | 1: the reader sleeps and wants to be woken | the reader; the writer clears it |
| 256 to 263 | 1: the writer sleeps, for want of room | the writer; the reader clears it |
| from 4096 on | the bytes, at their count modulo the ring's size | the writer |

Counts are native 64-bit integers, each on a cache line of its own. A `Writer` and a `Reader` each belong to one thread.
What the other process has written is not trusted: a count that cannot be is an error, and no more.

The order of things matters, and Python has no fence but its locks (`_fence`):

* Bytes come before the count that tells of them, and are read before the count that gives their room away. An x86
  processor keeps to this by itself; others are made to.
* The wish to be woken comes before the last look, and a new count before the look for a wish, or an end would sleep
  beside what it waits for. No processor keeps to this by itself.
"""

from __future__ import annotations

import errno
import platform
import threading

DATA_AT = 4096
_PUT, _TAKEN, _READER_SLEEPS, _WRITER_SLEEPS = 8, 16, 24, 32
"""Of the 64-bit words."""

_LOOSE = platform.machine() not in ("x86_64", "AMD64")
"""Whether the processor may swap two writes, or a read and a later write."""

_lock = threading.Lock()


def _fence() -> None:
    """What stands before this happens before what stands after it, for every processor.

    Taking a lock is a locked instruction on x86, which is a fence by itself. ARM only promises that what stands before
    a release has happened when the lock is taken anew, and that nothing behind that overtakes it (Arm Architecture
    Reference Manual, "barrier-ordered-before"): so there it takes two rounds.
    """
    with _lock:
        pass
    if _LOOSE:
        with _lock:
            pass


class _End:
    """What both ends have.

    Args:
        buffer: the whole piece of memory; what lies behind `DATA_AT` is a power of two long.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._words = buffer[:DATA_AT].cast("Q")
        self._data = buffer[DATA_AT:]
        self.size = len(self._data)
        self._mask = self.size - 1
        assert not self.size & self._mask, "a power of two"
        self._count = 0

    def close(self) -> None:
        self._words.release()
        self._data.release()


class Writer(_End):
    """The end that puts bytes in."""

    def put(self, data: memoryview) -> int:
        """As much of `data` as there is room for; how many bytes."""
        words, count, size = self._words, self._count, self.size
        used = count - words[_TAKEN]
        if not 0 <= used <= size:
            raise OSError(errno.EPROTO, "it took more out of shared memory than was put in")
        length = len(data)
        if length > size - used:
            length = size - used
            if not length:
                return 0
        at = count & self._mask
        end = at + length
        if end <= size:
            self._data[at:end] = data if length == len(data) else data[:length]
        else:
            self._data[at:] = data[: size - at]
            self._data[: end - size] = data[size - at : length]
        self._count = count + length
        if _LOOSE:
            _fence()
        words[_PUT] = self._count
        return length

    @property
    def reader_sleeps(self) -> bool:
        """Whether the reader has to be woken, for what has been put; asked once for each wish."""
        _fence()
        if not self._words[_READER_SLEEPS]:
            return False
        self._words[_READER_SLEEPS] = 0
        return True

    def wish(self) -> None:
        """To be woken when there is room; `room` tells, after this, whether there is some already."""
        self._words[_WRITER_SLEEPS] = 1
        _fence()

    @property
    def room(self) -> bool:
        """Whether anything can be put in."""
        return self._count - self._words[_TAKEN] < self.size


class Reader(_End):
    """The end that takes bytes out."""

    def take(self, into: memoryview) -> int:
        """As many bytes as there are and `into` holds; 0 when there are none."""
        words, count, size = self._words, self._count, self.size
        length = words[_PUT] - count
        if not length:
            return 0
        if not 0 < length <= size:
            raise OSError(errno.EPROTO, "it put more into shared memory than fits")
        length = min(length, len(into))
        if _LOOSE:
            _fence()
        at = count & self._mask
        end = at + length
        if end <= size:
            into[:length] = self._data[at:end]
        else:
            into[: size - at] = self._data[at:]
            into[size - at : length] = self._data[: end - size]
        self._count = count + length
        if _LOOSE:
            _fence()
        words[_TAKEN] = self._count
        return length

    @property
    def writer_sleeps(self) -> bool:
        """Whether the writer has to be woken, for what has been taken; asked once for each wish."""
        _fence()
        if not self._words[_WRITER_SLEEPS]:
            return False
        self._words[_WRITER_SLEEPS] = 0
        return True

    def wish(self) -> None:
        """To be woken when there is something; `empty` tells, after this, whether there is something already."""
        self._words[_READER_SLEEPS] = 1
        _fence()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return bool(self._words[_PUT] == self._count)

    def awake(self) -> None:
        """Take the wish back."""
        self._words[_READER_SLEEPS] = 0
