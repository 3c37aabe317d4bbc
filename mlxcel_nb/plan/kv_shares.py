"""Which kv-heads of each layer's cache a member keeps, and how saved ones are cut for other members. Pure.

A rank keeps the heads that its queries read, a stage those of its layers. Heads that several ranks keep are the same
on each, so any of them will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mlxcel_nb.errors import WireError
from mlxcel_nb.plan.shards import Range

MOST_HEADS = 1 << 16


class KvShare(NamedTuple):
    """Heads from `begin` up to `end`, `of` so many; `of` is 0 for all there are, however many."""

    begin: int
    end: int
    of: int

    def heads(self, total: int) -> Range:
        """As a range of `total` heads.

        Raises:
            WireError: it is a share of another number.
        """
        if self.of in (0, total):
            return (self.begin, self.end) if self.of else (0, total)
        raise WireError(f"kv-heads {self.begin} to {self.end} of {self.of} are no part of {total}")

    def total(self, kept: int) -> int:
        """How many heads there are in all, where a member keeps so many."""
        if self.of and kept != self.end - self.begin:
            raise WireError(f"{kept} kv-heads where {self.end - self.begin} of {self.of} were to be")
        return self.of or kept


ALL = KvShare(0, 0, 0)

Shares = tuple[KvShare | None, ...]
"""Of each of the model's caches; None for one that the member keeps nothing in."""


def read_shares(told: Any) -> Shares:
    """What a member says of itself.

    Raises:
        WireError: it cannot be read.
    """
    if not isinstance(told, list):
        raise WireError("a member's share of keys and values cannot be read")
    return tuple(None if each is None else _share(each) for each in told)


def _share(told: Any) -> KvShare:
    if not isinstance(told, list) or len(told) != 3 or not all(type(each) is int for each in told):
        raise WireError("a member's share of keys and values cannot be read")
    share = KvShare(*told)
    if share != ALL and not 0 <= share.begin < share.end <= share.of <= MOST_HEADS:
        raise WireError(f"a member keeps kv-heads {share.begin} to {share.end} of {share.of}")
    return share


def sources(members: Mapping[str, Shares], totals: Sequence[int | None]) -> dict[str, list[tuple[int, Range]]]:
    """From which member which heads of which cache are taken, so that every head comes once.

    Args:
        totals: heads of each cache; None for one that nobody keeps anything in.

    Raises:
        WireError: some head is on no member.
    """
    found: dict[str, list[tuple[int, Range]]] = {name: [] for name in members}
    for cache, total in enumerate(totals):
        if total is None:
            continue
        covered: set[int] = set()
        for name, shares in members.items():
            if (share := shares[cache]) is not None and not covered >= set(range(*(heads := share.heads(total)))):
                covered.update(range(*heads))
                found[name].append((cache, heads))
        if covered != set(range(total)):
            raise WireError(f"nobody keeps all {total} kv-heads of layer {cache}")
    return found


def targets(shares: Shares, totals: Sequence[int | None]) -> list[tuple[int, Range]]:
    """Which heads of which cache a member is sent.

    Raises:
        WireError: it keeps something that there is none of, or a part of another number of heads.
    """
    if len(shares) != len(totals):
        raise WireError(f"{len(totals)} layers of keys and values for a model with {len(shares)}")
    found = []
    for cache, (share, total) in enumerate(zip(shares, totals, strict=True)):
        if share is not None and total is not None:
            found.append((cache, share.heads(total)))
    return found


def lots(pieces: Iterable[tuple[Any, int]], most: int) -> list[list[Any]]:
    """Pieces, each with its bytes, in lots of at most `most` bytes; a larger one is a lot by itself."""
    found: list[list[Any]] = []
    size = most + 1
    for piece, nbytes in pieces:
        if size + nbytes > most:
            found.append([])
            size = 0
        found[-1].append(piece)
        size += nbytes
    return found
