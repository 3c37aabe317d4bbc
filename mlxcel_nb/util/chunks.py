"""Memory for what comes in many parts. One owner."""

from __future__ import annotations

import numpy as np

CHUNK = 16 << 20
"""NumPy asks for huge pages from 4 MB on. Memory that is new to the process then costs a quarter: the system clears
2 MB at once instead of 4 KB at each first touch, of which a core does some 2 GB a second."""

ALIGNED = 64
"""A line of the cache."""


class Chunks:
    """Hands out memory that is cut from large chunks. A chunk is freed when nothing refers to any part of it."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        """So much, with anything in it."""
        size = -(-nbytes // ALIGNED) * ALIGNED
        if size > len(self._rest):
            self._rest = memoryview(np.empty(max(size, CHUNK), np.uint8))
        taken, self._rest = self._rest[:nbytes], self._rest[size:]
        return taken

    def let_go(self) -> None:
        """The next will not come soon: nothing is held for it."""
        self._rest = memoryview(b"")
