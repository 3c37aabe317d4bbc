"""Caches of layers a stage does not hold: they store nothing, but count along.

A model makes its masks from the cache of some fixed layer, which may live on another stage. So every stage keeps a
cache for every layer, of the model's own kind, and those of foreign layers are only moved forward.
Touched by the MLX thread alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx


def leaves(caches: Any) -> Iterator[Any]:
    """Every cache that counts tokens, also those a layer has several of."""
    return (cache for cache in every(caches) if hasattr(cache, "offset"))


def every(caches: Any) -> Iterator[Any]:
    """Every cache, also those a layer has several of, and those that do not count."""
    for cache in caches:
        if isinstance(cache, list | tuple):
            yield from every(cache)
        elif hasattr(cache, "caches"):
            yield from every(cache.caches)
        elif cache is not None:
            yield cache


def positions(caches: Any) -> list[Any]:
    """Where each of the `leaves` stands: a number, or an array of one for each row of a batch."""
    return [cache.offset for cache in leaves(caches)]


def advance_others(caches: Any, before: list[Any], count: int) -> None:
    """Move on by `count` tokens whatever a step has not moved from where it stood `before` it.

    The positions of a batch are an array, which mlx-lm adds to, once for each layer. Nothing evaluates what a layer
    without rotary positions adds up, or one of another stage, so that their graphs would grow from step to step. All
    layers that stood at one array get one new array instead, whose values are known.
    """
    moved: dict[int, mx.array] = {}
    for cache, position in zip(leaves(caches), before, strict=True):
        if isinstance(position, int):
            if cache.offset == position:
                advance(cache, count)
            continue
        if cache.offset is position:
            advance(cache, count)
        if id(position) not in moved:
            moved[id(position)] = _plus(position, count)
        cache.offset = moved[id(position)]


def advance(cache: Any, count: int) -> None:
    """Move a foreign layer's cache on by `count` tokens, so that its offset and masks are what the owner's are.

    `offset` is what every kind of key-value cache counts. A rotating cache has a write position too, which
    follows from the same sizes its own updates go through; a chunked one forgets its oldest tokens.
    """
    if cache is None or not hasattr(cache, "offset"):
        return
    if hasattr(cache, "left_padding"):
        _advance_batch(cache, count)
        return
    if hasattr(cache, "max_size") and hasattr(cache, "_idx"):
        cache._idx = _rotating_position(cache._idx, cache.offset, count, cache.max_size, getattr(cache, "keep", 0))
    cache.offset += count
    if hasattr(cache, "start_position"):  # the owner's is cut when the next step begins, before anybody reads it
        cache.start_position = max(cache.start_position, cache.offset - cache.chunk_size)
    if hasattr(cache, "window_size"):  # DeepSeek 4.1's keeps rows, and its model counts them
        rows = 0 if cache.window is None else cache.window.shape[1]
        cache.window = mx.zeros((1, min(rows + count, cache.window_size), 0))


def _rotating_position(position: int, offset: int, count: int, max_size: int, keep: int) -> int:
    """Where a rotating cache writes next, after `count` more tokens arrived at once."""
    if count == 1:  # overwrites the oldest in place
        return (keep if position >= max_size else position) + 1
    if offset == 0:
        return count
    held = position if position == offset else max_size  # they part once the oldest has been overwritten or cut
    return min(held, max_size - 1) + count


def _advance_batch(cache: Any, count: int) -> None:
    """The same for several sequences, whose rows end at a common column."""
    cache.offset = _plus(cache.offset, count)
    if not hasattr(cache, "max_size"):
        cache._idx += count
        return
    cut = 0
    if count == 1:
        if cache._idx > cache.max_size:  # several tokens at once have left more than the window
            cut, cache._idx = cache._idx - cache.max_size, cache.max_size
        if cache._idx == cache.max_size:
            cache._idx, cache.rotated = 0, True
        cut += cache.rotated
    elif cache._offset:
        held = cache.max_size if cache.rotated else cache._idx
        cut = max(0, held - cache.max_size + 1)
        cache._idx, cache.rotated = held - cut, False
    cache._idx += count
    cache._offset += count
    if cut:
        cache.left_padding = _plus(cache.left_padding, -cut)


def _plus(array: mx.array, count: int) -> mx.array:
    """A sum that is no graph: a few numbers, which Python adds."""
    values: Any = array.tolist()
    return mx.array([value + count for value in values])
