"""Who waits, and in which order they are asked in. Pure.

Those that were put back come first, by arrival: they have been promised an answer. Then owners take turns, so that
one who asks a hundred times does not keep the others waiting; each owner's requests stay in the order in which they
came.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterator

from mlxcel_nb.errors import Busy
from mlxcel_nb.scheduling.sequence import Request, Sequence
from mlxcel_nb.util.shares import has_room

AHEAD = 8
"""Requests of one owner that may be asked in before those in front of them, which wait for what another is reading."""


class Waiting:
    """The queue."""

    def __init__(self) -> None:
        self._put_back: list[Sequence] = []
        self._owners: dict[str, deque[Sequence]] = {}  # in the order of their turns
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._put_back) + sum(map(len, self._owners.values()))

    def check_room(self, request: Request, bound: int, bound_tokens: int) -> None:
        """Whether one more may wait. Nobody's requests take all the room that there is.

        Raises:
            Busy: it may not.
        """
        own, tokens = self._owners.get(request.owner, ()), len(request.prompt) + len(request.made)
        own_tokens = sum(len(each.tokens) for each in own)
        fits = has_room(len(own), len(self), bound) and has_room(own_tokens, self.tokens, bound_tokens, tokens)
        if len(self) and not fits:
            raise Busy(
                f"{len(self)} requests with {self.tokens} tokens are waiting already, {len(own)} of them yours",
                advice="Ask again in a while, or load the model on more nodes.",
            )

    def add(self, sequence: Sequence) -> None:
        self._owners.setdefault(sequence.request.owner, deque()).append(sequence)
        self.tokens += len(sequence.tokens)

    def put_back(self, sequence: Sequence) -> None:
        bisect.insort(self._put_back, sequence, key=lambda each: each.number)
        self.tokens += len(sequence.tokens)

    def first(self) -> Iterator[Sequence]:
        """Those that may be next, in order: all that were put back, and the first few of each owner."""
        yield from self._put_back
        for queue in self._owners.values():
            yield from itertools.islice(queue, AHEAD)

    def everybody(self) -> list[Sequence]:
        return [*self._put_back, *(each for queue in self._owners.values() for each in queue)]

    def take(self, sequence: Sequence) -> None:
        """It has been asked in: its owner's next turn comes after all others'."""
        new = sequence not in self._put_back
        self.remove(sequence)
        owner = sequence.request.owner
        if new and owner in self._owners:
            self._owners[owner] = self._owners.pop(owner)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._put_back:
            self._put_back.remove(sequence)
        else:
            queue = self._owners[sequence.request.owner]
            queue.remove(sequence)
            if not queue:
                del self._owners[sequence.request.owner]
        self.tokens -= len(sequence.tokens)
