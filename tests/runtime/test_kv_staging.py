"""Keys and values that have come to a member, and questions about them that make no sense."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxcel_nb.errors import Busy, WireError
from mlxcel_nb.runtime import kv_staging, kv_store
from mlxcel_nb.runtime.kv_staging import Staging
from mlxcel_nb.scheduling.step_plan import BLOCK


class Part:
    """A part whose model has two caches."""

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import KVCache

        return [KVCache(), KVCache()]


PART: Any = Part()


def pieces(cache: int, *which: int, value: float = 1.0) -> kv_staging.Pieces:
    return {(cache, each): mx.full((1, 2, BLOCK, 4), value) for each in which}


def test_a_block_is_put_together_of_what_came_and_taken_once() -> None:
    staging = Staging()
    staging.put("a", 7, 0, pieces(1, 0))
    staging.put("a", 7, 0, pieces(1, 1, value=2.0))
    block = staging.take(7, 0, PART)
    assert block.layers[0] is None and block.layers[1] is not None
    assert [float(x[0, 0, 0, 0]) for x in block.layers[1]] == [1.0, 2.0] and staging.nbytes == 0
    with pytest.raises(WireError, match="has not come"):
        staging.take(7, 0, PART)


def test_keys_without_values_are_no_block() -> None:
    staging = Staging()
    staging.put("a", 7, 0, pieces(0, 0))
    with pytest.raises(WireError, match="without its values"):
        staging.take(7, 0, PART)


def test_who_leaves_takes_what_it_sent_along() -> None:
    staging = Staging()
    staging.put("a", 1, 0, pieces(0, 0, 1))
    staging.put("a", 2, 0, pieces(0, 0, 1))
    staging.put("b", 3, 0, pieces(0, 0, 1))
    staging.drop("a", 1)
    assert staging.nbytes == 2 * 2 * 2 * BLOCK * 4 * 4
    staging.drop("b", 2)  # another's
    staging.drop("a")
    assert staging.take(3, 0, PART).layers[0] is not None and staging.nbytes == 0


def test_no_more_waits_than_may_but_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_staging, "MOST_STAGED", 100)
    staging = Staging()
    staging.put("a", 1, 0, pieces(0, 0))
    staging.put("a", 1, 0, pieces(0, 1))
    for owner, transfer, index in (("a", 1, 1), ("a", 2, 0), ("b", 3, 0)):
        with pytest.raises(Busy):
            staging.put(owner, transfer, index, pieces(0, 0, 1))
    staging.take(1, 0, PART)
    staging.put("b", 3, 0, pieces(0, 0, 1))


def test_a_piece_of_another_size_than_it_says_is_refused() -> None:
    good = [1, 0, 2, 4, bytes(2 * BLOCK * 4 * 4)]
    assert kv_store._read({"type": "kv", "dtype": "float32", "pieces": [good]})[1, 0].shape == (1, 2, BLOCK, 4)
    for bad in (
        [1, 0, 2, 4, bytes(3)], [1, 2, *good[2:]], [-1, *good[1:]], [1, 0, 0, *good[3:]], [1, 0, 1 << 20, *good[3:]],
        [True, *good[1:]], good[:4], 3, [*good[:4], "text"],
    ):  # fmt: skip
        with pytest.raises(WireError):
            kv_store._read({"type": "kv", "dtype": "float32", "pieces": [bad]})
    with pytest.raises(WireError, match="of 'int8'"):
        kv_store._read({"type": "kv", "dtype": "int8", "pieces": [good]})


def test_token_ids_come_back_as_they_went() -> None:
    assert kv_store.unpack_ids(kv_store.pack_ids([0, 5, 2**32 - 1])) == [0, 5, 2**32 - 1]
    with pytest.raises(WireError):
        kv_store.unpack_ids(b"abc")
