"""Blocks of keys and values: the tokens of a prefix that several sequences begin with.

Only caches that keep every token in a column of its own can be cut: windows and states hold what came of all tokens.
For the MLX thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.batching_rows import PLAIN, kind_of
from mlxcel_nb.models.caches import every
from mlxcel_nb.models.part import LoadedPart

Pair = tuple[mx.array, mx.array] | None
"""Keys and values (1, H, tokens, D)."""


@dataclass(frozen=True)
class Block:
    """What a rank holds of some tokens.

    Arrays of one shape lie in one: each by itself would take some 700 bytes more, a thirtieth of the keys that a layer
    of SmolLM2-135M keeps of 32 tokens.

    Args:
        tokens: how many.
        packs: keys and values (N, H, tokens, D) of all layers that have this shape.
        places: of each cache, in which pack its keys and its values lie, and where; None for those of other stages.
    """

    tokens: int
    packs: tuple[mx.array, ...]
    places: tuple[tuple[tuple[int, int], tuple[int, int]] | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(pack.nbytes for pack in self.packs)

    def layer(self, cache: int) -> Pair:
        """Keys and values of a cache; views."""
        place = self.places[cache]
        return None if place is None else tuple(self.packs[pack][at : at + 1] for pack, at in place)  # type: ignore[return-value]

    @property
    def layers(self) -> tuple[Pair, ...]:
        """Of all caches."""
        return tuple(map(self.layer, range(len(self.places))))


def packed(tokens: int, layers: Iterable[Pair]) -> Block:
    """A block of copies of these keys and values, evaluated."""
    lots: dict[tuple[tuple[int, ...], mx.Dtype], list[mx.array]] = {}
    places: list[Any] = []
    for pair in layers:
        where = []
        for x in pair or ():
            lot = lots.setdefault((tuple(x.shape), x.dtype), [])
            where.append((list(lots).index((tuple(x.shape), x.dtype)), len(lot)))
            lot.append(x)
        places.append(tuple(where) if pair else None)
    packs = tuple(mx.concatenate(lot) if len(lot) > 1 else mx.contiguous(lot[0]) for lot in lots.values())
    mx.eval(packs)
    return Block(tokens, packs, tuple(places))


def reusable(caches: list[Any]) -> bool:
    """Whether a model's caches, single or batched, can be cut into blocks."""
    return all(kind_of(cache) is PLAIN for cache in every(caches))


def cut(caches: list[Any], begin: int, end: int, *, slot: int | None = None) -> Block:
    """The tokens from `begin` to `end` of a sequence; copies, evaluated, so that the caches can be freed.

    Args:
        caches: `reusable` ones, of one sequence, or of several of which `slot` is meant.
    """
    layers: list[Pair] = []
    row, padding = slot or 0, None if slot is not None else 0
    for cache in every(caches):
        if cache.keys is None:
            layers.append(None)
            continue
        if padding is None:  # in all layers the same
            padding = cache.left_padding.tolist()[row]
        keys, values = (x[row : row + 1, :, padding + begin : padding + end] for x in (cache.keys, cache.values))
        layers.append((keys, values))
    return packed(end - begin, layers)


def from_blocks(blocks: Sequence[Block], part: LoadedPart) -> list[Any]:
    """The caches of a sequence that begins with `blocks`, one after the other; the blocks stay as they are."""
    caches = part.make_cache()
    made = []
    for index, cache in enumerate(every(caches)):
        pairs = [pair for block in blocks if (pair := block.layer(index)) is not None]
        if pairs:
            cache.keys, cache.values = (mx.concatenate(list(each), axis=2) for each in zip(*pairs, strict=True))
            made += [cache.keys, cache.values]
        cache.offset = sum(block.tokens for block in blocks)
    mx.eval(made)
    return caches
