"""mlx-lm's caches travel: what arrives goes on as the original does, whatever kind it is."""

from __future__ import annotations

import copy
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_caches

from mlxcel_nb.errors import ModelError, WireError
from mlxcel_nb.models.arrays import as_bytes
from mlxcel_nb.models.cache_state import Landings, describe, kept_as, restore
from mlxcel_nb.wire.kv import Layout, Range, Transfer
from mlxcel_nb.wire.kv_assembler import Complete, KVAssembler
from mlxcel_nb.wire.kv_sender import KVSender

MODEL = bytes(32)
HEADS, DIM = 2, 64

CACHES: dict[str, Any] = {
    "plain": mlx_caches.KVCache,
    "concatenated": mlx_caches.ConcatenateKVCache,
    "rotated": lambda: mlx_caches.RotatingKVCache(32, keep=4),
    "rotating, not yet full": lambda: mlx_caches.RotatingKVCache(300, keep=4),
    "int8": lambda: mlx_caches.QuantizedKVCache(32, 8),
    "int4": lambda: mlx_caches.QuantizedKVCache(64, 4),
    "chunked": lambda: mlx_caches.ChunkedKVCache(64),
    "list": lambda: mlx_caches.CacheList(mlx_caches.KVCache(), mlx_caches.RotatingKVCache(16)),
}


def some(tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    shape = (1, HEADS, tokens, DIM)
    return mx.random.normal(shape).astype(dtype), mx.random.normal(shape).astype(dtype)


def update(cache: Any, keys: mx.array, values: mx.array) -> list[mx.array]:
    """What attention sees after these tokens."""
    if isinstance(cache, mlx_caches.CacheList):
        return [x for part in cache.caches for x in update(part, keys, values)]
    seen = [x if isinstance(x, list | tuple) else [x] for x in cache.update_and_fetch(keys, values)]
    if isinstance(cache, mlx_caches.ChunkedKVCache):
        cache.maybe_trim_front()
    return [x for part in seen for x in part]


def filled(name: str, dtype: mx.Dtype, chunks: tuple[int, ...] = (70, 1, 1, 30, 1)) -> Any:
    mx.random.seed(3)
    cache = CACHES[name]()
    for tokens in chunks:
        update(cache, *some(tokens, dtype))
    return cache


def moved(cache: Any, tokens: int, *, begin: int = 0, encoding: str = "plain", before: Any = None) -> Any:
    """`cache`, sent in small pieces that arrive in disorder."""
    state = describe(cache, begin=begin)
    own = Transfer(
        request="r", model=MODEL, epoch=0, number=1, heads=Range(0, HEADS), tokens=Range(begin, tokens),
        layout=state.layout, dtype=state.dtype,
    )  # fmt: skip
    sender, landings = KVSender(own, [3], state.nbytes, encoding=encoding), Landings()
    head = [sender.begin(), sender.layer(3, state.layout, state.dtype, state.specs, state.scalars)]
    pieces = [
        b"".join(map(bytes, parts))
        for index, x in enumerate(state.arrays)
        for parts in sender.pieces(3, index, as_bytes(x), piece_bytes=4096)
    ]
    random.Random(0).shuffle(pieces)
    receiver = KVAssembler(model=MODEL, layers=range(8), limit=1 << 26, place=landings.place)
    *_, done = [receiver.add(memoryview(message)) for message in [*head, *pieces, sender.end()]]
    assert isinstance(done, Complete)
    arrived = done.layers[3]
    return restore(arrived.layout, landings.take(own, 3, arrived), arrived.scalars, before=before)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("encoding", ["plain", "lz4"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_goes_on_where_it_was(name: str, dtype: mx.Dtype, encoding: str) -> None:
    cache = filled(name, dtype)
    arrived = moved(copy.deepcopy(cache), 103, encoding=encoding)
    for tokens in (1, 1, 5):
        keys, values = some(tokens, dtype)
        ours, theirs = update(cache, keys, values), update(arrived, keys, values)
        assert all(mx.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
        if name not in {"list", "chunked"}:
            for window in (None, 16):
                masks = [c.make_mask(3, window_size=window, return_array=True) for c in (cache, arrived)]
                assert mx.array_equal(*masks)


@pytest.mark.parametrize("name", CACHES)
def test_slots_that_hold_nothing_are_not_sent(name: str) -> None:
    cache = filled(name, mx.float16, (3,))
    element = {"int8": 1 + 2 * 2 / 32, "int4": 0.5 + 2 * 2 / 64}.get(name, 2)
    times = 2 if name == "list" else 1
    assert describe(cache).nbytes == times * 2 * HEADS * 3 * DIM * element


def test_only_the_tokens_a_receiver_lacks_are_sent() -> None:
    cache, before = filled("plain", mx.float16), mlx_caches.KVCache()
    first = [x[..., :50, :] for x in cache.keys_and_values()]
    before.update_and_fetch(*first)
    arrived = moved(cache, 103, begin=50, before=before)
    assert arrived.offset == 103
    assert all(mx.array_equal(a, b) for a, b in zip(cache.keys_and_values(), arrived.keys_and_values(), strict=True))
    with pytest.raises(WireError, match="comes whole"):
        restore(Layout.ROTATING, [], {"max_size": 5, "keep": 0}, before=before)


def test_mla_s_latents_are_a_plain_cache() -> None:
    cache = mlx_caches.KVCache()
    cache.update_and_fetch(mx.random.normal((1, 1, 9, 512)), mx.random.normal((1, 1, 9, 64)))
    arrived = moved(cache, 9)
    assert all(mx.array_equal(a, b) for a, b in zip(cache.keys_and_values(), arrived.keys_and_values(), strict=True))


def test_states_without_tokens_travel_with_their_gaps() -> None:
    cache: Any = mlx_caches.ArraysCache(3, left_padding=[2])
    cache[0], cache[2] = mx.random.normal((1, 3, 96)).astype(mx.bfloat16), mx.random.normal((1, 8, 16, 32))
    arrived = moved(cache, 40)
    assert arrived[1] is None and mx.array_equal(arrived.left_padding, mx.array([2])) and arrived.lengths is None
    assert mx.array_equal(arrived[0], cache[0]) and mx.array_equal(arrived[2], cache[2])


@pytest.mark.parametrize("name", CACHES)
def test_an_empty_cache_travels_too(name: str) -> None:
    arrived = moved(CACHES[name](), 0)
    keys, values = some(4, mx.float16)
    ours = update(CACHES[name](), keys, values)
    assert all(mx.array_equal(a, b) for a, b in zip(ours, update(arrived, keys, values), strict=True))


@pytest.mark.parametrize(("encoding", "most"), [("int8", 0.01), ("int4", 0.08)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_cache_may_travel_as_codes(encoding: str, most: float, dtype: mx.Dtype) -> None:
    """Case 39: sender int8 or int4, receiver float16."""
    cache = filled("plain", dtype)
    arrived = moved(cache, 103, encoding=encoding)
    for was, now in zip(cache.keys_and_values(), arrived.keys_and_values(), strict=True):
        off = mx.abs(was.astype(mx.float32) - now.astype(mx.float32)).max() / mx.abs(was.astype(mx.float32)).max()
        assert now.dtype == dtype and 0 < off < most


def quantised_layer(group: int, bits: int, dtype: mx.Dtype = mx.float16) -> Any:
    mx.random.seed(5)
    cache = mlx_caches.QuantizedKVCache(group, bits)
    cache.update_and_fetch(*some(40, dtype))
    return cache


def plain(cache: Any) -> list[mx.array]:
    group, bits = cache.group_size, cache.bits
    parts = cache.keys_and_values()
    return [mx.dequantize(c, s, b, group_size=group, bits=bits).astype(mx.float32) for c, s, b in parts]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("sent", "kept", "most"),
    [((64, 8), (32, 8), 0.0), ((64, 4), (32, 8), 0.0), ((32, 8), (64, 8), 0.01), ((32, 8), (32, 8), 0.0)],
)
def test_a_quantised_cache_is_kept_in_other_groups(
    sent: tuple[int, int], kept: tuple[int, int], most: float, dtype: mx.Dtype
) -> None:
    """Case 39: groups of 64 against groups of 32."""
    state = describe(cache := quantised_layer(*sent, dtype))
    arrays, scalars, error = kept_as(state.arrays, state.scalars, bits=kept[1], group=kept[0])
    theirs = restore(Layout.QUANTISED, arrays, scalars)
    assert (theirs.group_size, theirs.bits) == kept and error <= most
    for was, now in zip(plain(cache), plain(theirs), strict=True):
        rounding = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
        assert float(mx.abs(was - now).max() / mx.abs(was).max()) <= most + rounding
    update(theirs, *some(1, dtype))


def test_a_quantised_cache_that_would_lose_too_much_is_refused() -> None:
    """Case 39: both values are named."""
    state = describe(quantised_layer(32, 8))
    with pytest.raises(WireError, match="int8 in groups of 32 comes to one of int4 in groups of 64"):
        kept_as(state.arrays, state.scalars, bits=4, group=64)
    with pytest.raises(WireError, match="layer with arrays"):
        kept_as(state.arrays[:5], state.scalars, bits=4, group=64)


def test_a_kind_that_cannot_travel_says_so() -> None:
    with pytest.raises(ModelError, match="BatchKVCache cannot travel"):
        describe(mlx_caches.BatchKVCache([0]))


KEYS = [mx.zeros((1, 2, 5, 8))] * 2


@pytest.mark.parametrize(
    ("layout", "arrays", "scalars"),
    [
        (Layout.MIXED, [], {}),
        (Layout.PLAIN, KEYS[:1], {}),
        (Layout.PLAIN, [KEYS[0], mx.zeros((1, 2, 6, 8))], {}),
        (Layout.PLAIN, [mx.zeros((5,))] * 2, {}),
        (Layout.ROTATING, KEYS, {}),
        (Layout.ROTATING, KEYS, {"max_size": 8, "keep": 9, "offset": 5, "idx": 5}),
        (Layout.ROTATING, KEYS, {"max_size": 8, "keep": 0, "offset": -1, "idx": 5}),
        (Layout.ROTATING, KEYS, {"max_size": 8, "keep": 0, "offset": 5, "idx": 6}),
        (Layout.ROTATING, KEYS, {"max_size": True, "keep": 0, "offset": 5, "idx": 5}),
        (Layout.QUANTISED, KEYS, {"group": 32, "bits": 8}),
        (Layout.QUANTISED, [], {"group": 32, "bits": 9}),
        (Layout.CHUNKED, KEYS, {"chunk": 8, "offset": 6, "start": 0}),
        (Layout.STATE, KEYS, {"size": 2, "at": [0]}),
        (Layout.STATE, KEYS, {"size": 2, "at": [0, 0]}),
        (Layout.STATE, KEYS, {"size": 2, "at": [0, 2]}),
        (Layout.STATE, KEYS, {"size": 2, "at": [0, -3]}),
        (Layout.STATE, KEYS, {"size": 1 << 30, "at": [0, 1]}),
        (Layout.LIST, KEYS, {}),
        (Layout.LIST, KEYS, {"parts": [3]}),
        (Layout.LIST, KEYS, {"parts": [{"layout": 1, "arrays": 1, "scalars": {}}]}),
        (Layout.LIST, KEYS, {"parts": [{"layout": 9, "arrays": 2, "scalars": {}}]}),
        (Layout.LIST, KEYS, {"parts": [{"layout": 1, "arrays": 3, "scalars": {}}]}),
    ],
)
def test_numbers_that_no_cache_has_are_refused(layout: Layout, arrays: list[mx.array], scalars: dict[str, Any]) -> None:
    """Case 49: what a peer says of a cache is held against the arrays that came."""
    with pytest.raises(WireError):
        restore(layout, arrays, scalars)


def test_lists_of_lists_end_somewhere() -> None:
    scalars: dict[str, Any] = {"parts": []}
    for _ in range(6):
        scalars = {"parts": [{"layout": int(Layout.LIST), "arrays": 0, "scalars": scalars}]}
    with pytest.raises(WireError, match="deeper than 4"):
        restore(Layout.LIST, [], scalars)
