"""Which way a collective goes, and how a buffer is cut for it. Pure.

Every rank has a link to every other, so three ways to sum are open:

* **direct**: everybody sends everything to everybody and adds it up. One step; each rank sends (n - 1) S bytes.
* **halves**: each rank sums one block of n, of which everybody sends it theirs, and hands the sum to all: a
  reduce-scatter and an all-gather, both by direct exchange. Two steps, 2 (n - 1) / n S bytes.
* **ring**: the same two halves passed from neighbour to neighbour, each block in n - 1 hops (Patarasuk and Yuan,
  "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). 2 (n - 1) steps, the bytes of *halves*,
  but no rank ever hears from more than one other at a time.

In all three one rank sums each block, or all sum it in the same order: every rank ends up with the same bits.
"""

from __future__ import annotations

import itertools
from enum import Enum

DIRECT_BYTES = 256 << 10
"""Up to this size one step is worth more than fewer bytes: so it was with a prototype on two cores. `Group(way=...)` is
there to measure it elsewhere."""

DIRECT_RANKS = 4
"""With more ranks than this the messages of a direct exchange, n (n - 1) of them, cost more than a second step ..."""

SMALL_BYTES = 8 << 10
"""... unless there is next to nothing in them."""

RING_RANKS = 8
"""With more ranks than this, all of them sending to one at once would overrun its link."""


class Way(Enum):
    DIRECT = "direct"
    HALVES = "halves"
    RING = "ring"


def choose(ranks: int, nbytes: int) -> Way:
    """How to sum `nbytes` over `ranks` ranks. A function of nothing else: all ranks come to the same answer."""
    if ranks <= 2 or nbytes <= SMALL_BYTES or (ranks <= DIRECT_RANKS and nbytes <= DIRECT_BYTES):
        return Way.DIRECT
    return Way.RING if ranks > RING_RANKS else Way.HALVES


def blocks(count: int, ranks: int) -> list[slice]:
    """Where each rank's block of `count` elements lies: as even as can be, the larger ones first."""
    share, more = divmod(count, ranks)
    ends = [share * n + min(n, more) for n in range(ranks + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
