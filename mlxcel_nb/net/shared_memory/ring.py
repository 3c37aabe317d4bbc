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

The order of things matters: bytes before the count that tells of them, and the wish to be woken before the last look.
Taking and releasing a lock is a barrier to compiler and processor on every machine, which is what `_fence` is for.
"""

from __future__ import annotations

import errno
import threading

DATA_AT = 4096
_PUT, _TAKEN, _READER_SLEEPS, _WRITER_SLEEPS = 8, 16, 24, 32
"""Of the 64-bit words."""

_lock = threading.Lock()


def _fence() -> None:
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
        with _lock:  # a fence, without the call
            pass
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

    def sleep(self) -> bool:
        """Wish to be woken when there is room; False where there is some already."""
        self._words[_WRITER_SLEEPS] = 1
        _fence()
        return self._count - self._words[_TAKEN] >= self.size

    @property
    def empty(self) -> bool:
        """Whether the reader has taken everything."""
        return self._words[_TAKEN] == self._count


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
        with _lock:  # a fence, without the call
            pass
        at = count & self._mask
        end = at + length
        if end <= size:
            into[:length] = self._data[at:end]
        else:
            into[: size - at] = self._data[at:]
            into[size - at : length] = self._data[: end - size]
        self._count = count + length
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

    def sleep(self) -> bool:
        """Wish to be woken when there is something; False where there is something already."""
        self._words[_READER_SLEEPS] = 1
        _fence()
        return bool(self._words[_PUT] == self._count)

    def awake(self) -> None:
        """Take the wish back."""
        self._words[_READER_SLEEPS] = 0
