"""mlx-lm's caches as what a KV transfer carries, and back: arrays, how each is cut, and a few numbers.

Slots that a cache has allocated and not used are never sent. What a peer says of a layer is looked up in a table of
layouts; no name of a class travels. For the thread that owns the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from mlxcel_nb.errors import ModelError, WireError
from mlxcel_nb.models.arrays import Landing, as_bytes, from_bytes, wire_name
from mlxcel_nb.wire import quantised, quantising
from mlxcel_nb.wire.dtypes import dtype_named
from mlxcel_nb.wire.kv import ArraySpec, Layout, Transfer
from mlxcel_nb.wire.kv_assembler import ArrivedLayer
from mlxcel_nb.wire.quantising import TOLERANCE

TOKEN_AXIS = 2
"""Of keys, values, and their codes and scales: (batch, heads, tokens, head dimension)."""

MAX_DEPTH = 4
"""Caches of caches."""


class LayerState(NamedTuple):
    """What one layer's cache holds. `dtype` is that of the elements it stands for."""

    layout: Layout
    dtype: str
    arrays: tuple[mx.array, ...]
    specs: tuple[ArraySpec, ...]
    scalars: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def describe(cache: Any, *, begin: int = 0) -> LayerState:
    """The state of one layer's cache; of its tokens, where each has a slot, those from `begin` on.

    Raises:
        ModelError: a kind of cache that cannot travel.
    """
    layout, arrays, scalars = _taken_apart(cache, begin)
    axes = [_axis(layout, x) for x in arrays]
    specs = tuple(ArraySpec(wire_name(x.dtype), axis, tuple(x.shape)) for x, axis in zip(arrays, axes, strict=True))
    floats = [spec.dtype for spec in specs if spec.dtype != "uint32"]
    return LayerState(layout, floats[0] if floats else "float32", tuple(arrays), specs, scalars)


def restore(layout: Layout, arrays: Sequence[mx.array], scalars: dict[str, Any], *, before: Any = None) -> Any:
    """The cache that `describe` was given.

    Args:
        before: a cache that holds the tokens before the ones that came; it is added to. Plain layouts only.

    Raises:
        WireError: numbers that no such cache has.
    """
    cache = _put_together(layout, list(arrays), scalars, 0)
    if before is None:
        return cache
    if layout is not Layout.PLAIN:
        raise WireError(f"a cache of layout {layout.name.lower()} comes whole, not from some token on")
    before.update_and_fetch(cache.keys, cache.values)
    return before


def kept_as(
    arrays: Sequence[mx.array], scalars: dict[str, Any], *, bits: int, group: int, tolerance: float = TOLERANCE
) -> tuple[list[mx.array], dict[str, Any], float]:
    """A quantised layer in the bits and groups kept here: its arrays, its numbers, the largest relative error.

    Raises:
        WireError: it is above `tolerance`; both forms are named. Or arrays that are no quantised layer.
    """
    sent = _number(scalars, "bits", 2, 8), _number(scalars, "group", 16, 128)
    if not _has(list(arrays), 6) or sent == (bits, group):
        return list(arrays), scalars, 0.0
    made, worst = [], 0.0
    for part in (arrays[:3], arrays[3:]):
        dtype, lead = wire_name(part[1].dtype), part[1].shape[:-1]
        dims = (*lead, part[1].shape[-1] * sent[1])
        data = memoryview(quantised.prefix(*sent) + b"".join(bytes(as_bytes(x)) for x in part))
        new, measured = quantising.convert(dtype, dims, data, bits=bits, group=group, tolerance=tolerance)
        worst = max(worst, measured.relative_max)
        split = quantised.split(dtype_named(dtype), dims, new)
        made.append(from_bytes(split.codes, "uint32", (*lead, dims[-1] * bits // 32)))
        made += [from_bytes(x, dtype, (*lead, dims[-1] // group)) for x in (split.scales, split.biases)]
    return made, {**scalars, "bits": bits, "group": group}, worst


class Landings:
    """Where the arrays of arriving caches go: memory of MLX arrays, so nothing is copied again at the end.

    `place` is for `KVAssembler`; `take` gives a complete layer's arrays.
    """

    def __init__(self) -> None:
        self._landings: dict[tuple[Transfer, int, int], Landing] = {}

    def place(self, transfer: Transfer, layer: int, index: int, spec: ArraySpec) -> memoryview:
        landing = self._landings[transfer, layer, index] = Landing(spec.dtype, spec.dims)
        return landing.memory

    def take(self, transfer: Transfer, layer: int, arrived: ArrivedLayer) -> list[mx.array]:
        """The arrays of one layer, in order; those that are empty are made."""
        keys = [(transfer, layer, index) for index in range(len(arrived.specs))]
        landings = [self._landings.pop(key, None) for key in keys]
        return [
            (Landing(spec.dtype, spec.dims) if landing is None else landing).array()
            for spec, landing in zip(arrived.specs, landings, strict=True)
        ]

    def discard(self, transfer: Transfer) -> None:
        """Forget a transfer that will not be completed."""
        for key in [key for key in self._landings if key[0] == transfer]:
            del self._landings[key]


def _axis(layout: Layout, x: mx.array) -> int:
    """Along which axis an array is cut: its tokens, or where it has none its longest."""
    if layout is not Layout.STATE and layout is not Layout.LIST:
        return TOKEN_AXIS
    return max(range(x.ndim), key=lambda axis: x.shape[axis]) if x.ndim else 0


# ---------------------------------------------------------------------------------------------------- out


def _taken_apart(cache: Any, begin: int) -> tuple[Layout, list[mx.array], dict[str, Any]]:
    kind = type(cache)
    if kind is mlx_caches.ArraysCache:
        held = [*enumerate(cache.cache), (-1, cache.left_padding), (-2, cache.lengths)]
        present = [(index, x) for index, x in held if x is not None]
        return Layout.STATE, [x for _, x in present], {"size": len(cache.cache), "at": [index for index, _ in present]}
    if kind is mlx_caches.CacheList:
        arrays, parts = [], []
        for part in cache.caches:
            layout, own, scalars = _taken_apart(part, 0)
            arrays += own
            parts.append({"layout": int(layout), "arrays": len(own), "scalars": scalars})
        return Layout.LIST, arrays, {"parts": parts}
    if kind in {mlx_caches.KVCache, mlx_caches.ConcatenateKVCache}:
        return Layout.PLAIN, [] if cache.empty() else [x[..., begin:, :] for x in cache.keys_and_values()], {}
    if kind is mlx_caches.RotatingKVCache:
        scalars = {"offset": cache.offset, "keep": cache.keep, "max_size": cache.max_size, "idx": cache._idx}
        return Layout.ROTATING, [] if cache.empty() else list(cache.keys_and_values()), scalars
    if kind is mlx_caches.QuantizedKVCache:
        parts_ = () if cache.empty() else cache.keys_and_values()
        codes = [x[..., begin:, :] for part in parts_ for x in part]
        return Layout.QUANTISED, codes, {"group": cache.group_size, "bits": cache.bits}
    if kind is mlx_caches.ChunkedKVCache:
        scalars = {"offset": cache.offset, "chunk": cache.chunk_size, "start": cache.start_position}
        return Layout.CHUNKED, [] if cache.empty() else list(cache.keys_and_values()), scalars
    raise ModelError(f"a cache of type {kind.__name__} cannot travel between nodes")


# ----------------------------------------------------------------------------------------------------- in


def _put_together(layout: Layout, arrays: list[mx.array], scalars: dict[str, Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise WireError(f"caches of caches, deeper than {MAX_DEPTH}")
    if layout is Layout.LIST:
        return _list(arrays, scalars, depth)
    make = _MAKERS.get(layout)
    if make is None:
        raise WireError(f"no cache has layout {layout.name}")
    return make(arrays, scalars)


def _list(arrays: list[mx.array], scalars: dict[str, Any], depth: int) -> Any:
    parts = scalars.get("parts")
    if not isinstance(parts, list):
        raise WireError("a list of caches without its parts")
    caches, at = [], 0
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("scalars"), dict):
            raise WireError("a list of caches with a part that is none")
        code, count = _number(part, "layout", 1, len(Layout) - 1), _number(part, "arrays", 0, len(arrays) - at)
        caches.append(_put_together(Layout(code), arrays[at : at + count], part["scalars"], depth + 1))
        at += count
    if at != len(arrays):
        raise WireError(f"a list of caches with {len(arrays)} arrays, its parts have {at}")
    return mlx_caches.CacheList(*caches)


def _plain(arrays: list[mx.array], scalars: dict[str, Any]) -> Any:
    del scalars
    cache = mlx_caches.KVCache()
    if _has(arrays, 2):
        cache.keys, cache.values = arrays
        cache.offset = arrays[0].shape[TOKEN_AXIS]
    return cache


def _rotating(arrays: list[mx.array], scalars: dict[str, Any]) -> Any:
    size = _number(scalars, "max_size", 1)
    cache = mlx_caches.RotatingKVCache(size, keep=_number(scalars, "keep", 0, size))
    if _has(arrays, 2):
        cache.keys, cache.values = arrays
        cache.offset = _number(scalars, "offset", 1)
        cache._idx = _number(scalars, "idx", 0, arrays[0].shape[TOKEN_AXIS])
    return cache


def _quantised(arrays: list[mx.array], scalars: dict[str, Any]) -> Any:
    cache: Any = mlx_caches.QuantizedKVCache(_number(scalars, "group", 16, 128), _number(scalars, "bits", 2, 8))
    if _has(arrays, 6):
        cache.keys, cache.values = list(arrays[:3]), list(arrays[3:])
        cache.offset = arrays[0].shape[TOKEN_AXIS]
    return cache


def _chunked(arrays: list[mx.array], scalars: dict[str, Any]) -> Any:
    cache = mlx_caches.ChunkedKVCache(_number(scalars, "chunk", 1))
    if _has(arrays, 2):
        cache.keys, cache.values = arrays
        cache.offset = _number(scalars, "offset", 1)
        cache.start_position = _number(scalars, "start", 0, cache.offset)
        if cache.offset - cache.start_position != arrays[0].shape[TOKEN_AXIS]:
            raise WireError("a chunked cache whose positions and arrays differ in length")
    return cache


def _state(arrays: list[mx.array], scalars: dict[str, Any]) -> Any:
    size, at = _number(scalars, "size", 0, 64), scalars.get("at")
    if not isinstance(at, list) or len(at) != len(arrays) or len(set(map(repr, at))) != len(at):
        raise WireError("a cache of states that does not say which they are")
    cache: Any = mlx_caches.ArraysCache(size)
    for index, x in zip(at, arrays, strict=True):
        if type(index) is not int or not -2 <= index < size:
            raise WireError(f"a cache of {size} states has none at {index!r:.20}")
        if index == -1:
            cache.left_padding = x
        elif index == -2:
            cache.lengths = x
        else:
            cache[index] = x
    return cache


_MAKERS: dict[Layout, Callable[[list[mx.array], dict[str, Any]], Any]] = {
    Layout.PLAIN: _plain,
    Layout.ROTATING: _rotating,
    Layout.QUANTISED: _quantised,
    Layout.CHUNKED: _chunked,
    Layout.STATE: _state,
}


def _has(arrays: list[mx.array], count: int) -> bool:
    """Whether there are arrays: `count`, of four dimensions and as many tokens each, or none at all."""
    if not arrays:
        return False
    if len(arrays) != count or any(x.ndim != 4 or x.shape[TOKEN_AXIS] != arrays[0].shape[TOKEN_AXIS] for x in arrays):
        raise WireError(f"a cache layer with arrays {[tuple(x.shape) for x in arrays]}")
    return True


def _number(scalars: dict[str, Any], name: str, low: int, high: int = (1 << 31) - 1) -> int:
    value = scalars.get(name)
    if type(value) is not int or not low <= value <= high:
        raise WireError(f"a cache layer whose {name} is {value!r:.20}")
    return value
