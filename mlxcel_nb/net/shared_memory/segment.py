"""A piece of memory that two processes of one host share, without a name that could be left behind.

The one that makes it keeps it open and tells the other where: its process and descriptor, under Linux's /proc, which
only processes of the same user may open. A secret word in front shows that it is the very piece that was meant, as
process numbers mean another thing in another container. Its size is sealed: a peer that could cut it short would kill
whoever reads it next.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import mmap
import os
import secrets
import sys
from pathlib import Path

from mlxcel_nb.net.further.offer import Unavailable

WORD_BYTES = 32

_NAME = "mlxcel-nb"
"""Seen in /proc; nothing is found by it."""

# linux/memfd.h and linux/fcntl.h. Interpreters that were built for an old C library do not name them.
_CLOEXEC, _ALLOW_SEALING = 1, 2
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 1 | 2 | 4
"""No further seals, no shrinking, no growing."""


class Segment:
    """Mapped memory; `buffer[WORD_BYTES:]` is the caller's."""

    def __init__(self, memory: mmap.mmap, word: bytes, descriptor: int = -1) -> None:
        self._memory = memory
        self._descriptor = descriptor
        self.word = word
        self.buffer = memoryview(memory)

    @classmethod
    def make(cls, size: int) -> Segment:
        """`size` bytes of zeros behind a fresh word.

        Raises:
            Unavailable: the system has no such memory, or no room.
        """
        if not sys.platform.startswith("linux"):
            raise Unavailable("it is used on Linux only")
        try:
            descriptor = _memfd()
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, descriptor)
                os.ftruncate(descriptor, size)
                fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
                segment = cls(_map(descriptor, size), secrets.token_bytes(WORD_BYTES), descriptor)
                undo.pop_all()
        except OSError as error:
            raise Unavailable(f"this system gives none: {error.strerror}") from None
        segment.buffer[:WORD_BYTES] = segment.word
        return segment

    @property
    def where(self) -> tuple[int, int]:
        """Process and descriptor, for `open`."""
        return os.getpid(), self._descriptor

    @classmethod
    def open(cls, process: int, descriptor: int, word: bytes, size: int) -> Segment:
        """What another process of this user has made.

        Raises:
            Unavailable: it cannot be opened from here, or is something else.
        """
        place = Path(f"/proc/{process}/fd/{descriptor}")
        try:
            if not str(place.readlink()).startswith(f"/memfd:{_NAME}"):  # opening a device may have effects
                raise Unavailable("what the peer calls its memory is something else")
            opened = os.open(place, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as error:
            raise Unavailable(f"the peer's memory cannot be opened: {error.strerror}") from None
        try:
            if fcntl.fcntl(opened, _GET_SEALS) != _SEALS or os.fstat(opened).st_size != size:
                raise Unavailable("what the peer calls its memory is something else")
            memory = _map(opened, size)
        except OSError as error:
            raise Unavailable(f"the peer's memory cannot be shared: {error.strerror}") from None
        finally:
            os.close(opened)
        if not hmac.compare_digest(memory[:WORD_BYTES], word):
            memory.close()
            raise Unavailable("what the peer calls its memory is another process's")
        return cls(memory, word)

    def close(self) -> None:
        """Unmap; twice is once. Views of `buffer` must be gone."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.buffer.release()
        self._memory.close()


def _memfd() -> int:
    """A piece of anonymous memory, as a descriptor."""
    create = getattr(os, "memfd_create", None)
    if create is not None:
        return int(create(_NAME, _CLOEXEC | _ALLOW_SEALING))
    library = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = int(library.memfd_create(_NAME.encode(), _CLOEXEC | _ALLOW_SEALING))
    except AttributeError:
        raise Unavailable("this system's C library has none to give") from None
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _map(descriptor: int, size: int) -> mmap.mmap:
    """Present in memory from the start: the first touch of a page costs as much as a small message."""
    return mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
