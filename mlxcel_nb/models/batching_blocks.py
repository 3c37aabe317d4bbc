"""Blocks of keys and values: the tokens of a prefix that several sequences begin with.

Only caches that keep every token in a column of its own can be cut: windows and states hold what came of all tokens.
For the MLX thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.batching_rows import PLAIN, kind_of
from mlxcel_nb.models.caches import every
from mlxcel_nb.models.part import LoadedPart


@dataclass(frozen=True)
class Block:
    """What a rank holds of some tokens.

    Args:
        tokens: how many.
        layers: keys and values (1, H, tokens, D) of each cache; None for those of other stages.
    """

    tokens: int
    layers: tuple[tuple[mx.array, mx.array] | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pair in self.layers if pair for x in pair)


def reusable(caches: list[Any]) -> bool:
    """Whether a model's caches, single or batched, can be cut into blocks."""
    return all(kind_of(cache) is PLAIN for cache in every(caches))


def cut(caches: list[Any], begin: int, end: int, *, slot: int | None = None) -> Block:
    """The tokens from `begin` to `end` of a sequence; copies, evaluated, so that the caches can be freed.

    Args:
        caches: `reusable` ones, of one sequence, or of several of which `slot` is meant.
    """
    layers: list[tuple[mx.array, mx.array] | None] = []
    for cache in every(caches):
        if cache.keys is None:
            layers.append(None)
            continue
        row, padding = (0, 0) if slot is None else (slot, cache.left_padding.tolist()[slot])
        keys, values = (x[row : row + 1, :, padding + begin : padding + end] for x in (cache.keys, cache.values))
        layers.append((mx.contiguous(keys), mx.contiguous(values)))
    mx.eval([x for pair in layers if pair for x in pair])
    return Block(end - begin, tuple(layers))


def from_blocks(blocks: Sequence[Block], part: LoadedPart) -> list[Any]:
    """The caches of a sequence that begins with `blocks`, one after the other; the blocks stay as they are."""
    caches = part.make_cache()
    made = []
    for index, cache in enumerate(every(caches)):
        pairs = [pair for block in blocks if (pair := block.layers[index]) is not None]
        if pairs:
            cache.keys, cache.values = (mx.concatenate(list(each), axis=2) for each in zip(*pairs, strict=True))
            made += [cache.keys, cache.values]
        cache.offset = sum(block.tokens for block in blocks)
    mx.eval(made)
    return caches
