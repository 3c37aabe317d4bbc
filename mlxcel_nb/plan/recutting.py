"""Who sends whom which part of a sequence's caches, between two instances that split the model differently. Pure.

Caches are counted in the model's own order, those within others one by one. Of each cache a member keeps all, nothing,
or some ranges of every array along one axis: heads of keys and values, channels and heads of states. What several
members keep alike is the same on each, so any of them will do, and it is sent once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mlxcel_nb.errors import WireError
from mlxcel_nb.plan.shards import Range

MOST = 1 << 24
"""Length of an axis, and number of caches, that anybody believes in."""


class ArrayShare(NamedTuple):
    """What a member keeps of an array: `ranges` of `axis`, whose length in the whole model is `total`.

    They lie one after the other in the member's own array; `in_place` where they lie as in the whole one, among empty
    places. `total` is 0 for all there is.
    """

    axis: int
    ranges: tuple[Range, ...]
    total: int
    in_place: bool = False

    @property
    def length(self) -> int:
        """Of the axis, in the member's own array; 0 where it is all there is."""
        return self.total if self.in_place else sum(end - begin for begin, end in self.ranges)


WHOLE = ArrayShare(0, (), 0)

CacheShare = tuple[ArrayShare, ...]
"""Of each array of a cache; or a single one for all of them."""

Holdings = tuple[CacheShare | None, ...]
"""Of each cache; None where a member keeps nothing."""


class Cut(NamedTuple):
    """Ranges of an array along an axis, in the whole model's numbering; none where nothing is wanted."""

    axis: int
    ranges: tuple[Range, ...]


class Want(NamedTuple):
    """What one member is to send another of a cache: a cut for each of the share's arrays, None for all of it."""

    cache: int
    cuts: tuple[Cut | None, ...]


def kv_share(begin: int, end: int, of: int) -> CacheShare:
    """Kv-heads from `begin` up to `end` of `of`; keys and values alike."""
    return (ArrayShare(1, ((begin, end),), of),)


def wants(own: Holdings, senders: Mapping[str, Holdings], *, turn: int = 0) -> dict[str, tuple[Want, ...]]:
    """What each of `senders` is to send to a member that keeps `own`, so that all of it comes once.

    Args:
        turn: number of the member: of senders that keep the same, members begin with different ones.

    Raises:
        WireError: somebody keeps another number of caches, or arrays, or of heads; or nobody keeps some of it.
    """
    for name, theirs in senders.items():
        if len(theirs) != len(own):
            raise WireError(f"{len(theirs)} caches where {len(own)} are kept here", node=name)
    found: dict[str, list[Want]] = {name: [] for name in senders}
    for cache, share in enumerate(own):
        if share is None:
            continue
        keepers = [(name, kept) for name, told in senders.items() if (kept := told[cache]) is not None]
        start = (turn + cache) % max(1, len(keepers))
        for name, cuts in _shared_out(share, keepers[start:] + keepers[:start], cache):
            found[name].append(Want(cache, cuts))
    return {name: tuple(each) for name, each in found.items()}


def _shared_out(
    own: CacheShare, keepers: Sequence[tuple[str, CacheShare]], cache: int
) -> list[tuple[str, tuple[Cut | None, ...]]]:
    """Which keeper sends what of each array of one cache."""
    for name, theirs in keepers:
        if len(theirs) != len(own):
            raise WireError(f"cache {cache} has {len(theirs)} arrays there, {len(own)} here", node=name)
    columns = [_of_array(mine, [theirs[n] for _, theirs in keepers], cache) for n, mine in enumerate(own)]
    rows = [tuple(column[n] for column in columns) for n in range(len(keepers))]
    return [
        (name, row)
        for (name, _), row in zip(keepers, rows, strict=True)
        if any(cut is None or cut.ranges for cut in row)
    ]


def _of_array(own: ArrayShare, theirs: Sequence[ArrayShare], cache: int) -> list[Cut | None]:
    """What each sender gives of one array; None is all of it."""
    totals = {share.total for share in (own, *theirs) if share.total}
    axes = {share.axis for share in (own, *theirs) if share.total}
    if len(totals) > 1 or len(axes) > 1:
        raise WireError(f"cache {cache} is cut out of {sorted(totals)} along axes {sorted(axes)}")
    if not totals:
        if not theirs:
            raise WireError(f"nobody keeps cache {cache}")
        return [None, *[Cut(0, ())] * (len(theirs) - 1)]
    (total,), (axis,) = totals, axes
    missing = list(own.ranges if own.total else ((0, total),))
    given: list[Cut | None] = []
    for share in theirs:
        taken, left = [], []
        for span in missing:
            inside, outside = _apart(span, share.ranges if share.total else ((0, total),))
            taken += inside
            left += outside
        given.append(Cut(axis, tuple(taken)))
        missing = left
    if missing:
        raise WireError(f"nobody keeps {missing[0][0]} to {missing[0][1]} of {total} of cache {cache}")
    return given


def _apart(span: Range, ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
    """The parts of `span` that lie in `ranges`, and those that do not, each in order."""
    inside = sorted((max(span[0], a), min(span[1], b)) for a, b in ranges if max(span[0], a) < min(span[1], b))
    outside, at = [], span[0]
    for begin, end in inside:
        if at < begin:
            outside.append((at, begin))
        at = max(at, end)
    if at < span[1]:
        outside.append((at, span[1]))
    return inside, outside


def places(share: ArrayShare, ranges: Iterable[Range]) -> list[Range]:
    """Where `ranges` of the whole model lie in a member's own array.

    Raises:
        WireError: they are not in its share.
    """
    if not share.total or share.in_place:
        return list(ranges)
    found = []
    for begin, end in ranges:
        at = 0
        for a, b in share.ranges:
            if a <= begin and end <= b:
                found.append((at + begin - a, at + end - a))
                break
            at += b - a
        else:
            raise WireError(f"{begin} to {end} is not among {list(share.ranges)} of {share.total}")
    return found


# ------------------------------------------------------------------------------------------------ as told


def tell(holdings: Holdings) -> list[Any]:
    """As lists, for a message."""
    return [share and [_told(each) for each in share] for share in holdings]


def _told(share: ArrayShare) -> list[Any]:
    return [share.axis, [list(span) for span in share.ranges], share.total, share.in_place]


def read(told: Any) -> Holdings:
    """The inverse of `tell`.

    Raises:
        WireError: it cannot be read.
    """
    if not isinstance(told, list) or len(told) > MOST:
        raise _unreadable()
    return tuple(None if share is None else tuple(_read_array(each) for each in _list(share)) for share in told)


def tell_wants(wanted: Iterable[Want]) -> list[Any]:
    return [
        [want.cache, [cut and [cut.axis, [list(span) for span in cut.ranges]] for cut in want.cuts]] for want in wanted
    ]


def read_wants(told: Any) -> tuple[Want, ...]:
    """The inverse of `tell_wants`.

    Raises:
        WireError: it cannot be read.
    """
    found = []
    for each in _list(told):
        cache, cuts = _list(each, 2)
        found.append(Want(_number(cache), tuple(None if cut is None else _read_cut(cut) for cut in _list(cuts))))
    return tuple(found)


def _read_cut(told: Any) -> Cut:
    axis, ranges = _list(told, 2)
    return Cut(_number(axis), _spans(ranges))


def _read_array(told: Any) -> ArrayShare:
    axis, ranges, total, in_place = _list(told, 4)
    share = ArrayShare(_number(axis), _spans(ranges), _number(total), in_place)
    if (
        type(in_place) is not bool
        or any(end > share.total for _, end in share.ranges)
        or bool(share.ranges) != bool(share.total)
    ):
        raise _unreadable()
    return share


def _spans(told: Any) -> tuple[Range, ...]:
    spans = tuple((_number(begin), _number(end)) for begin, end in (_list(each, 2) for each in _list(told)))
    if any(begin >= end for begin, end in spans):
        raise _unreadable()
    return spans


def _list(told: Any, length: int | None = None) -> list[Any]:
    if not isinstance(told, list) or (length is not None and len(told) != length):
        raise _unreadable()
    return told


def _number(told: Any) -> int:
    if type(told) is not int or not 0 <= told <= MOST:
        raise _unreadable()
    return told


def _unreadable() -> WireError:
    return WireError("a member's share of the caches cannot be read")
