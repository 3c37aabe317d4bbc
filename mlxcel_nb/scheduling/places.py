"""What the batches of a home hold beside their rows: places of those that have left. Pure.

`models.batching.Group` cuts nobody out at once, since a copy of all others is dear: a place stays free for the next
one, and a batch as long as it was until its next step. This is how much that may be, seen from outside: never less than
there is, and no more than the rules of a group allow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass
class Batch:
    """Of one group.

    Args:
        free: places without a row, at most.
        quiet: steps since a row has left.
        tokens: of the longest row that has left since the last step.
    """

    free: int = 0
    quiet: int = 0
    tokens: int = 0


class Places:
    """Those of all groups of a home."""

    def __init__(self, groups: int) -> None:
        self._batches = [Batch() for _ in range(groups)]

    def left(self, group: int, tokens: int, rows: int) -> None:
        """A row of so many tokens leaves a batch with the next plan; so many stay. One alone is no batch any more."""
        if rows < 2:
            self._batches[group] = Batch()
            return
        batch = self._batches[group]
        batch.free += 1
        batch.quiet = 0
        batch.tokens = max(batch.tokens, tokens)

    def of(self, group: int) -> Batch:
        return replace(self._batches[group])

    def put_back(self, group: int, batch: Batch) -> None:
        """Nothing has left since this was how it is."""
        self._batches[group] = batch

    def stepped(self, group: int, rows: int, joined: int) -> None:
        """A step of a group has been sent, with so many rows, of which some have come with it.

        Who comes takes a free place, or all are copied and none is left. They also are before a step of which a quarter
        would be free places, and after a number of steps: when those have cost as much as the copy.
        """
        batch = self._batches[group]
        batch.tokens = 0
        batch.quiet += 1
        batch.free = 0 if batch.quiet > rows else min(max(0, batch.free - joined), rows // 3)

    def beside(self, group: int) -> tuple[int, int]:
        """What there is beside the rows of a group: free places at most, and how long its batch still is."""
        return self._batches[group].free, self._batches[group].tokens
