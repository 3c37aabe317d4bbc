"""How many tokens, and how many requests at once, the memory that is left on each node holds. Pure.

A node says of its part how each kind of cache grows and what room there is; of nodes on one host, which share it, the
last one that loaded knows best. What counts for the model is the node with least room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.plan.facts import Growth

LONGEST = 1 << 24
"""Tokens; where nothing else is an end, nobody looks further."""


def longest(fits: Callable[[int], bool], most: int) -> int:
    """The most tokens up to `most` that fit; `fits` holds up to some length and not beyond."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


@dataclass(frozen=True)
class Room:
    """One node's.

    Args:
        caches: how many there are of each kind of growth.
        available: bytes.
    """

    caches: Mapping[Growth, int]
    available: int

    @property
    def per_token(self) -> int:
        return sum(count * growth.per_token for growth, count in self.caches.items())

    def at(self, tokens: int) -> int:
        """Bytes of the caches of one sequence."""
        return sum(count * growth.at(tokens) for growth, count in self.caches.items())

    def tokens(self, most: int = 0) -> int:
        """The longest single sequence, up to `most`; 0 for no end but `LONGEST`."""
        return longest(lambda tokens: self.at(tokens) <= self.available, most or LONGEST)

    def sequences(self, tokens: int) -> int:
        """How many of `tokens` tokens each fit at once."""
        each = self.at(tokens)
        return self.available // each if each else LONGEST

    def to_dict(self) -> dict[str, Any]:
        rows = [[count, x.per_token, x.fixed, x.most or 0, x.step] for x, count in self.caches.items()]
        return {"available": self.available, "caches": rows}

    @classmethod
    def from_dict(cls, told: Any) -> Room | None:
        """None for what is no such thing: a peer's word, or of a node that could not say."""
        if not isinstance(told, dict) or not isinstance(rows := told.get("caches"), list):
            return None
        caches: dict[Growth, int] = {}
        for row in [[told.get("available"), 0, 0, 0, 1], *rows]:
            if (
                not isinstance(row, list)
                or len(row) != 5
                or any(type(x) is not int or x < 0 for x in row)
                or not row[4]
            ):
                return None
        for count, per_token, fixed, most, step in rows:
            caches[Growth(per_token, fixed, most or None, step)] = count
        return cls(caches, told["available"])


def counted(growths: Iterable[Growth]) -> dict[Growth, int]:
    """Equal ones together, whoever reads them."""
    return dict(Counter(Growth(x.per_token, x.fixed, x.most, x.step) for x in growths))


def shared(rooms: Sequence[Room | None], hosts: Sequence[str]) -> list[Room | None]:
    """Each node's own of what the nodes of a host have in common: equal parts of the least that one of them saw."""
    left = {
        host: min((r.available for r, h in zip(rooms, hosts, strict=True) if r and h == host), default=0)
        for host in hosts
    }
    count = Counter(hosts)
    return [r and Room(r.caches, left[host] // count[host]) for r, host in zip(rooms, hosts, strict=True)]
