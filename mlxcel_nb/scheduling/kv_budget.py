"""What the caches of many sequences take on the nodes of one home, and whether it fits. Pure.

Sequences that decode together have one batched cache, in which all are as long as the longest (mlx-lm pads them on the
left): it takes its rows, and places that rows have left, times what the longest takes. A sequence whose prompt is still
being read counts as if it were in its batch already, so that it fits when it gets there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.scheduling.step_plan import BLOCK


class Batch(NamedTuple):
    """A batched cache."""

    rows: int
    """And places that rows have left."""
    tokens: int
    """Of the longest row."""


class Use(NamedTuple):
    """Bytes on one node."""

    used: int
    available: int


class KvBudget:
    """The room for caches on the nodes of one home.

    Args:
        rooms: one a node; what does not fit on one of them does not fit.
        kept: the share of each room that blocks take at most.
    """

    def __init__(self, rooms: Sequence[Room], kept: float) -> None:
        self._rooms = tuple(rooms)
        self._kept = kept
        self.longest = min(room.tokens() for room in rooms)
        """Tokens of the longest sequence that fits alone."""

    def beside(self, batches: Iterable[Batch]) -> int:
        """Blocks that there is room for beside these batches, on every node; negative where not even they fit."""
        batches = list(batches)
        return min(self._beside(room, self._bytes(room, batches)) for room in self._rooms)

    def _beside(self, room: Room, used: int) -> int:
        if used > room.available:
            return -1
        left = min(room.available - used, int(self._kept * room.available))
        return left // block if (block := BLOCK * room.per_token) else left

    def fullest(self, batches: Iterable[Batch], blocks: int) -> Use:
        """Of the node with the largest share of its room in use."""
        batches = list(batches)
        uses = [Use(self._bytes(r, batches) + blocks * BLOCK * r.per_token, r.available) for r in self._rooms]
        return max(uses, key=lambda use: use.used / max(1, use.available))

    @staticmethod
    def _bytes(room: Room, batches: list[Batch]) -> int:
        return sum(batch.rows * room.at(batch.tokens) for batch in batches)
