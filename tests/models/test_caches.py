"""A cache that only counts along says the same of offsets and masks as one that is fed."""

from __future__ import annotations

import io
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


def merged(kind: int, lengths: list[int], *, fed: bool) -> tuple[Any, list[Any]]:
    """A batch of sequences that were read in chunks of 5."""
    from mlxcel_nb.models.batching_rows import Numbers, kind_of

    singles = [kinds()[kind] for _ in lengths]
    for cache, length in zip(singles, lengths, strict=True):
        for at in range(0, length, 5):
            step(cache, min(5, length - at), 1, fed=fed)
    how = kind_of(singles[0])
    assert how is not None
    return how.build(None, [], singles, Numbers()), singles


def step(cache: Any, count: int, rows: int, *, fed: bool) -> None:
    if fed:
        before = positions([cache])
        cache.update_and_fetch(mx.zeros((rows, 1, count, 32)), mx.zeros((rows, 1, count, 32)))
        advance_others([cache], before, count)
    else:
        advance_others([cache], positions([cache]), count)


def told(cache: Any) -> list[Any]:
    numbers = [cache.offset.tolist(), cache.left_padding.tolist(), cache._idx]
    return [*numbers, cache._offset, cache.rotated] if hasattr(cache, "rotated") else numbers


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize("kind", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [[3, 5], [2, 8, 7], [20, 1], [13, 13]], ids=str)
def test_batches_too_count_as_their_owner_s_do(
    kind: int, steps: list[int], window: int | None, lengths: list[int]
) -> None:
    """Below, at and above a window of 8, one by one and several tokens at once, around the ring and again."""
    batches = [merged(kind, lengths, fed=fed)[0] for fed in (True, False)]
    for count in steps:
        assert told(batches[0]) == told(batches[1])
        for length in (1, count):
            masks = [as_array(cache.make_mask(length, window_size=window)) for cache in batches]
            assert masks[0] == masks[1]
        for cache, fed in zip(batches, (True, False), strict=True):
            step(cache, count, len(lengths), fed=fed)
    assert told(batches[0]) == told(batches[1])
    assert batches[1].empty()


def test_layers_of_a_batch_stand_at_one_array_that_is_no_graph() -> None:
    """Nothing adds up from step to step where nobody reads it, as without rotary positions."""
    from mlxcel_nb.models.batching_rows import Numbers, kind_of

    how, numbers = kind_of(kinds()[0]), Numbers()
    assert how is not None
    pairs = [merged(0, [3, 5], fed=fed) for fed in (True, False)]
    fed, counted = [how.build(None, [], singles, numbers) for _, singles in pairs]
    graphs = []
    for _ in range(5):
        before = positions([fed, counted])
        assert before[0] is before[1]
        fed.update_and_fetch(mx.zeros((2, 1, 1, 32)), mx.zeros((2, 1, 1, 32)))
        advance_others([fed, counted], before, 1)
        text = io.StringIO()
        mx.export_to_dot(text, fed.offset, counted.offset)
        graphs.append(text.getvalue())
    assert fed.offset.tolist() == [8, 10]
    assert not any("Add" in graph for graph in graphs)


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
