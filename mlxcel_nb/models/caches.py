"""Caches of layers a stage does not hold: they store nothing, but count along.

A model makes its masks from the cache of some fixed layer, which may live on another stage. So every stage keeps a
cache for every layer, of the model's own kind, and those of foreign layers are only moved forward.
Touched by the MLX thread alone.
"""

from __future__ import annotations

from typing import Any


def advance(cache: Any, count: int) -> None:
    """Move a foreign layer's cache on by `count` tokens, so that its offset and masks are what the owner's are.

    `offset` is what every kind of key-value cache counts. A rotating cache has a write position too, which
    follows from the same sizes its own updates go through.
    """
    if cache is None or not hasattr(cache, "offset"):
        return
    if hasattr(cache, "max_size") and hasattr(cache, "_idx"):
        cache._idx = _rotating_position(cache._idx, cache.offset, count, cache.max_size, getattr(cache, "keep", 0))
    cache.offset += count


def _rotating_position(position: int, offset: int, count: int, max_size: int, keep: int) -> int:
    """Where a rotating cache writes next, after `count` more tokens arrived at once."""
    if count == 1:  # overwrites the oldest in place
        return (keep if position >= max_size else position) + 1
    if offset == 0:
        return count
    held = position if position == offset else max_size  # they part once the oldest has been overwritten or cut
    return min(held, max_size - 1) + count
