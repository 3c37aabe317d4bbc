"""Parts of caches: cut out where they are read, put together where they are wanted.

`put_together` works on bytes alone and is for any thread, all else for the one that owns the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlxcel_nb.errors import WireError
from mlxcel_nb.models.arrays import from_bytes
from mlxcel_nb.models.batching_rows import like
from mlxcel_nb.models.cache_state import LayerState, restore
from mlxcel_nb.models.caches import advance, every
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.plan.recutting import ArrayShare, CacheShare, Cut, Want, places
from mlxcel_nb.wire.dtypes import dtype_named
from mlxcel_nb.wire.kv import ArraySpec, Layout
from mlxcel_nb.wire.kv_assembler import ArrivedLayer


class Whole(NamedTuple):
    """A cache of a member's own, complete: the bytes of its arrays, as `cache_state.restore` takes them once they are
    arrays.
    """

    layout: Layout
    specs: tuple[ArraySpec, ...]
    arrays: tuple[memoryview, ...]
    scalars: dict[str, Any]


def cut_out(state: LayerState, share: CacheShare, want: Want) -> list[mx.array]:
    """What `want` asks for of each array of a cache of which this member keeps `share`; not evaluated, maybe empty."""
    found = []
    for number, array in enumerate(state.arrays):
        own, cut = _of(share, state.scalars, number), _of(want.cuts, state.scalars, number)
        if cut is None:
            found.append(array)
            continue
        pieces = [array[_slots(cut.axis, *span)] for span in places(own, cut.ranges) or [(0, 0)]]
        found.append(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, cut.axis))
    return found


def restored(whole: Whole) -> Any:
    """A cache, of its bytes; None for one without arrays.

    Raises:
        WireError: numbers that no such cache has.
    """
    if not whole.arrays:
        return None
    arrays = [from_bytes(x, s.dtype, s.dims) for x, s in zip(whole.arrays, whole.specs, strict=True)]
    return restore(whole.layout, arrays, whole.scalars)


def caches_of(part: LoadedPart, kept: Mapping[int, Any], tokens: int) -> list[Any]:
    """The caches of a sequence of `tokens` tokens: those `kept` here, as `restored` gave them; others count along."""
    made = part.make_cache()
    found = []
    for number, cache in enumerate(every(made)):
        if (known := kept.get(number)) is None:
            advance(cache, tokens)
        found.append(cache if known is None else known)
    return like(made, iter(found))


def put_together(share: CacheShare, came: Sequence[tuple[Want, ArrivedLayer]]) -> Whole:
    """A cache of which this member keeps `share`, of what each sender was asked for and has sent.

    Raises:
        WireError: their parts are of different caches, or are not what was asked for.
    """
    first = came[0][1]
    for _, layer in came[1:]:
        if (layer.layout, layer.scalars, len(layer.specs)) != (first.layout, first.scalars, len(first.specs)):
            raise WireError("a cache comes in parts that are not of one")
    joined = [_joined(_of(share, first.scalars, number), number, came) for number in range(len(first.specs))]
    return Whole(first.layout, tuple(spec for spec, _ in joined), tuple(memory for _, memory in joined), first.scalars)


def _of(shares: Sequence[Any], scalars: dict[str, Any], number: int) -> Any:
    """What holds for array `number`: it may be the same for all, and else goes by the place that the array has."""
    places_of = scalars.get("at")
    if places_of is None:
        return shares[0]
    place = places_of[number] if isinstance(places_of, list) and number < len(places_of) else None
    if not isinstance(place, int) or not 0 <= place < len(shares):
        raise WireError(f"a cache has an array in place {place!r:.20} of {len(shares)}")
    return shares[place]


def _joined(share: ArrayShare, number: int, came: Sequence[tuple[Want, ArrivedLayer]]) -> tuple[ArraySpec, memoryview]:
    """An array of the member's own, filled with what has come of it; where that is all in one, as it is."""
    parts: list[tuple[Cut, ArraySpec, memoryview]] = []
    for want, layer in came:
        spec, memory, cut = layer.specs[number], layer.arrays[number], _of(want.cuts, layer.scalars, number)
        if cut is None or (cut.ranges and cut.ranges == share.ranges and not share.in_place):
            return spec, memory
        if cut.ranges:
            parts.append((cut, spec, memory))
    if not parts:
        raise WireError("nothing has come of an array of a cache")
    cut, like, _ = parts[0]
    axis, length = cut.axis, share.length or sum(b - a for cut, *_ in parts for a, b in cut.ranges)
    dims = (*like.dims[:axis], length, *like.dims[axis + 1 :])
    made = np.zeros((*dims, dtype_named(like.dtype).itemsize), np.uint8)
    for cut, spec, memory in parts:
        count = sum(end - begin for begin, end in cut.ranges)
        if spec.dtype != like.dtype or spec.dims != (*dims[:axis], count, *dims[axis + 1 :]):
            raise WireError(f"parts {spec.dims} of {spec.dtype} and {dims} of {like.dtype} are not of one array")
        part, at = np.frombuffer(memory, np.uint8).reshape(*spec.dims, -1), 0
        for begin, end in places(share, cut.ranges):
            made[_slots(axis, begin, end)] = part[_slots(axis, at, at + end - begin)]
            at += end - begin
    return ArraySpec(like.dtype, like.axis, dims), memoryview(made.reshape(-1))


def _slots(axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(begin, end))
