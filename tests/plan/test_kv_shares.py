"""Which heads of which cache are taken from whom, and who is sent which."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mlxcel_nb.errors import WireError
from mlxcel_nb.plan.kv_shares import ALL, KvShare, Shares, lots, read_shares, sources, targets
from mlxcel_nb.plan.shards import split_heads

LAYERS = 4


def members(tp: int, pp: int, heads: int, kv_heads: int) -> dict[str, Shares]:
    """What the members of a layout keep."""
    shares = split_heads(heads, kv_heads, tp)
    stages = [range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp) for stage in range(pp)]
    return {
        f"{stage}.{rank}": tuple(
            (ALL if tp == 1 else KvShare(*share.keys, kv_heads)) if layer in layers else None for layer in range(LAYERS)
        )
        for stage, layers in enumerate(stages)
        for rank, share in enumerate(shares)
    }


LAYOUTS = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (2, 2), (3, 2)]


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (9, 3), (8, 2), (8, 1)])
def test_every_head_of_every_layer_is_taken_once_and_everybody_gets_what_it_keeps(
    tp: int, pp: int, heads: int, kv_heads: int
) -> None:
    """Two ranks that share a head are asked for it once, and are both sent it."""
    all_of_it = sorted(itertools.product(range(LAYERS), range(kv_heads)))
    kept = members(tp, pp, heads, kv_heads)
    totals = [kv_heads] * LAYERS
    taken = [
        (cache, head) for places in sources(kept, totals).values() for cache, own in places for head in range(*own)
    ]
    assert sorted(taken) == all_of_it
    sent: list[tuple[int, int]] = []
    for shares in kept.values():
        places = targets(shares, totals)
        assert [cache for cache, _ in places] == [layer for layer, share in enumerate(shares) if share is not None]
        sent += [(cache, head) for cache, own in places for head in range(*own)]
    assert sorted(set(sent)) == all_of_it
    assert len(sent) == len(all_of_it) if tp <= kv_heads else len(sent) == LAYERS * tp


def test_layers_that_keep_nothing_are_nobodys() -> None:
    kept: dict[str, Shares] = {"a": (ALL, ALL, None), "b": (None, None, ALL)}
    assert sources(kept, [2, None, 3]) == {"a": [(0, (0, 2))], "b": [(2, (0, 3))]}
    assert targets(kept["a"], [2, None, 3]) == [(0, (0, 2))]


def test_a_head_that_nobody_keeps_is_an_error() -> None:
    with pytest.raises(WireError, match="nobody keeps all 4 kv-heads of layer 0"):
        sources({"a": (KvShare(0, 2, 4),), "b": (KvShare(3, 4, 4),)}, [4])


def test_shares_of_another_number_are_refused() -> None:
    with pytest.raises(WireError, match="0 to 2 of 4 are no part of 3"):
        targets((KvShare(0, 2, 4),), [3])
    with pytest.raises(WireError, match="3 layers of keys and values for a model with 1"):
        targets((ALL,), [1, 1, 1])
    with pytest.raises(WireError, match="1 kv-heads where 2 of 4"):
        KvShare(0, 2, 4).total(1)
    assert KvShare(0, 2, 4).total(2) == 4 and ALL.total(3) == 3


@pytest.mark.parametrize(
    "told", [3, [[0, 1]], [[0, 2, 1]], [[1, 1, 4]], [[-1, 1, 4]], [[0, 1, "4"]], [[0, 1, 1 << 20]]]
)
def test_what_a_member_says_is_checked(told: Any) -> None:
    with pytest.raises(WireError):
        read_shares(told)
    assert read_shares([None, [0, 0, 0], [1, 3, 4]]) == (None, ALL, KvShare(1, 3, 4))


def test_lots_are_as_large_as_they_may_be() -> None:
    assert lots([("a", 5), ("b", 5), ("c", 1), ("d", 20), ("e", 1)], 10) == [["a", "b"], ["c"], ["d"], ["e"]]
    assert lots([], 10) == []
