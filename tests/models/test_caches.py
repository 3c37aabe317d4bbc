"""A cache that only counts along says the same of offsets and masks as one that is fed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.models import architecture
from mlxcel_nb.models.caches import advance, advance_others, positions
from tests.models.mesh import run_mesh
from tests.tiny import make_tiny

STEPS = [[5, 7, 9, 20], [1] * 30, [20, 1, 1, 5, 1, 1], [8, 1, 8], [7, 1, 1, 1, 20, 1], [1, 20, 3, 1]]


def kinds() -> list[Any]:
    architecture.enter_mlx_lm()
    from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

    return [KVCache(), RotatingKVCache(max_size=8), RotatingKVCache(max_size=8, keep=2), RotatingKVCache(max_size=300),
            QuantizedKVCache(group_size=32)]  # fmt: skip


def as_array(mask: Any) -> Any:
    return mask.tolist() if isinstance(mask, mx.array) else mask


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("window", [None, 4, 8])
def test_offsets_and_masks_are_those_of_a_cache_that_is_fed(kind: int, steps: list[int], window: int | None) -> None:
    fed, counted = kinds()[kind], kinds()[kind]
    for count in steps:
        assert counted.offset == fed.offset
        expected = as_array(fed.make_mask(count, window_size=window, return_array=False))
        assert as_array(counted.make_mask(count, window_size=window, return_array=False)) == expected
        fed.update_and_fetch(mx.zeros((1, 1, count, 32)), mx.zeros((1, 1, count, 32)))
        advance(counted, count)
    assert counted.offset == fed.offset == sum(steps)
    assert counted.empty()


def test_a_chunked_cache_begins_where_the_owner_s_begins_when_a_step_reads_it() -> None:
    """Llama 4: every step first cuts the front off, which a cache that holds nothing does not do by itself."""
    architecture.enter_mlx_lm()
    from mlx_lm.models.cache import ChunkedKVCache

    fed, counted = ChunkedKVCache(8), ChunkedKVCache(8)
    for count in (5, 7, 1, 1, 20, 1):
        for cache in (fed, counted):
            cache.maybe_trim_front()
        assert (counted.offset, counted.start_position) == (fed.offset, fed.start_position)
        fed.update_and_fetch(mx.zeros((1, 1, count, 4)), mx.zeros((1, 1, count, 4)))
        advance(counted, count)


def test_only_what_a_step_has_not_moved_is_moved() -> None:
    """In lists and pairs of caches too; one without a position, such as a state space's, is left alone."""
    architecture.enter_mlx_lm()
    from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

    fed, counted, inner, state = KVCache(), KVCache(), KVCache(), ArraysCache(2)
    caches = [fed, CacheList(state, inner), (counted, None), None]
    for _ in range(2):
        before = positions(caches)
        fed.update_and_fetch(mx.zeros((1, 1, 3, 4)), mx.zeros((1, 1, 3, 4)))
        advance_others(caches, before, 3)
    assert [fed.offset, counted.offset, inner.offset] == [6, 6, 6]


def test_a_missing_cache_is_nothing_to_move() -> None:
    advance(None, 3)


@pytest.mark.parametrize(
    "layer_types",
    [
        ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    ],
)
def test_windowed_layers_in_stages_of_their_own_are_equal(tmp_path: Path, layer_types: list[str]) -> None:
    """Case 8: a window of 8 and chunks around it; some stages hold windowed layers alone, with masks from elsewhere."""
    folder = make_tiny(tmp_path / "m", sliding_window=8, layer_types=layer_types)
    ids = [(i * 11 + 2) % 256 for i in range(41)]

    def logits(**split: Any) -> Any:
        return run_mesh(folder, ids, chunk=split.pop("chunk", 41), steps=12, **split)[0]

    whole = logits()
    assert np.isfinite(whole.prompt_logits).all()
    for split in ({"layers": "0,1,2-3,4"}, {"pp": 5, "chunk": 5}, {"pp": 2, "chunk": 9}, {"tp": 2, "pp": 2}):
        run = logits(**split)
        assert np.abs(run.prompt_logits - whole.prompt_logits).max() <= 1e-4
        assert run.tokens == whole.tokens
