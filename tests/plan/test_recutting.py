"""Caches between instances that split the model differently: every part comes once, and where it belongs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcel_nb.errors import WireError
from mlxcel_nb.plan.recutting import (
    WHOLE,
    ArrayShare,
    Holdings,
    kv_share,
    places,
    read,
    read_wants,
    tell,
    tell_wants,
    wants,
)
from mlxcel_nb.plan.shards import split_evenly, split_heads


def rank(heads: int, kv_heads: int, tp: int, index: int) -> Holdings:
    """A rank of a model with a layer of attention, one that nobody cuts, and a state of channels in three parts."""
    share = split_heads(heads, kv_heads, tp)[index]
    cut = kv_share(*share.keys, kv_heads) if tp > 1 else (WHOLE,)
    (a, b), total = split_evenly(12, tp)[index], 36
    channels = ArrayShare(2, ((a, b), (12 + a, 12 + b), (24 + a, 24 + b)), total) if tp > 1 else WHOLE
    return (cut, (WHOLE,), (channels, WHOLE), None)


@pytest.mark.parametrize(("senders", "receivers"), [*itertools.product([1, 2, 3, 4], repeat=2)])
def test_every_rank_gets_each_of_its_parts_once_and_in_its_place(senders: int, receivers: int) -> None:
    heads, kv_heads = 8, 4 if 3 in (senders, receivers) else 2
    theirs = {f"p{n}": rank(heads, kv_heads, senders, n) for n in range(senders)}
    channels = np.arange(36)
    for number in range(receivers):
        own = rank(heads, kv_heads, receivers, number)
        found = wants(own, theirs, turn=number)
        assert {name: read_wants(tell_wants(each)) for name, each in found.items()} == found
        sent = [want.cuts[0] for each in found.values() for want in each if want.cache == 0]
        spans = [span for cut in sent for span in (((0, kv_heads),) if cut is None else cut.ranges)]
        kv = [head for span in spans for head in range(*span)]
        (mine,) = own[0] or ()
        assert sorted(kv) == list(range(*(mine.ranges[0] if mine.total else (0, kv_heads))))
        assert sum(want.cache == 1 for each in found.values() for want in each) == 1, "what all keep is sent once"
        local = _local(own[2][0] if own[2] else WHOLE, channels)
        made = np.full_like(local, -1)
        for name, each in found.items():
            for want in each:
                if want.cache != 2:
                    continue
                cut = want.cuts[0]
                if cut is None:
                    made[:] = channels
                    continue
                share = (theirs[name][2] or ())[0]
                source = _local(share, channels)
                own_places = places((own[2] or ())[0], cut.ranges)
                for a, b in zip(places(share, cut.ranges), own_places, strict=True):
                    assert (made[slice(*b)] == -1).all(), "sent twice"
                    made[slice(*b)] = source[slice(*a)]
        assert (made == local).all()


def _local(share: ArrayShare, whole: np.ndarray) -> np.ndarray:
    return np.concatenate([whole[a:b] for a, b in share.ranges]) if share.total else whole


def test_members_begin_with_different_ones_of_those_that_keep_the_same() -> None:
    """MLA's latents lie on every rank: eight receivers take them from all four, two each."""
    theirs: dict[str, Holdings] = {f"p{n}": ((WHOLE,),) for n in range(4)}
    chosen = [next(name for name, each in wants(((WHOLE,),), theirs, turn=n).items() if each) for n in range(8)]
    assert sorted(chosen) == sorted(list(theirs) * 2)


def test_a_share_within_empty_places_is_found_where_it_would_be_in_the_whole() -> None:
    """RWKV-7's heads lie among empty ones."""
    assert places(ArrayShare(1, ((2, 4),), 8, in_place=True), [(2, 4)]) == [(2, 4)]
    assert places(ArrayShare(1, ((2, 4),), 8), [(3, 4)]) == [(1, 2)]
    with pytest.raises(WireError, match="1 to 3 is not among"):
        places(ArrayShare(1, ((2, 4),), 8), [(1, 3)])


def test_what_does_not_agree_is_an_error_that_names_it() -> None:
    one = kv_share(0, 2, 4)
    with pytest.raises(WireError, match="p0: 2 caches where 1 are kept here"):
        wants((one,), {"p0": (one, one)})
    with pytest.raises(WireError, match=r"cache 0 is cut out of \[4, 6\]"):
        wants((one,), {"p0": (kv_share(0, 2, 6),)})
    with pytest.raises(WireError, match="nobody keeps 1 to 2 of 4 of cache 0"):
        wants((one,), {"p0": (kv_share(0, 1, 4),), "p1": (kv_share(2, 4, 4),)})
    with pytest.raises(WireError, match="nobody keeps cache 0"):
        wants(((WHOLE,),), {"p0": (None,)})
    with pytest.raises(WireError, match="has 2 arrays there, 1 here"):
        wants(((WHOLE,),), {"p0": ((WHOLE, WHOLE),)})
    shares: list[Any] = [
        None, [[[1, [[0, 2]], 1, False]]], [[[1, [[2, 2]], 4, False]]], [[[1, [], 4, False]]],
        [[[True, [[0, 1]], 4, False]]], [[[0, [], 0, 0]]], [5], [[[1]]],
    ]  # fmt: skip
    for told in shares:
        with pytest.raises(WireError, match="cannot be read"):
            read(told)
    asked: list[Any] = [7, [[1]], [[1, [[0, [[0, 0]]]]]], [["x", []]], [[1, [[0]]]]]
    for told in asked:
        with pytest.raises(WireError, match="cannot be read"):
            read_wants(told)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4))
def test_holdings_survive_a_message(tp: int, other: int) -> None:
    for number in range(tp):
        held = rank(8, 4, tp, number)
        assert read(tell(held)) == held
