"""Attention and gates on a processor, with exponentials that are taken many at a time.

MLX's CPU build adds and multiplies many numbers at a time, but takes exponentials one by one: some 12 ns each, where a
product is 0.2 ns. Of a prompt's time that was a quarter, of a long one's half. The forwarder under MLX (`blas`) takes
them in 0.2 ns. There is one way only to have MLX call it in the midst of its own work, a product: by a matrix of one
element, which the forwarder knows, and which holds NaN, should anybody ever multiply by it. Large tables of scores are
worked on in pieces that stay in a core's cache. Where there is no such forwarder all is left to MLX. Any thread.

Shapes: B sequences, H heads of queries, K of keys, L queries, S keys, D head dimension.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.models import blas

LEAST = 3 << 11
"""Scores from which on this is faster than MLX: below, the time goes into the number of operations."""
PIECE = 1 << 17
"""Elements of one operand that a core's cache holds beside the others."""
WORTH_PACKING = 128
"""Rows of a product for which BLAS packs the other operand without spending much of its time on that."""
HIDDEN = -1e30
"""Added to the score of a key that is not seen. Finite, so that a row that sees none gives numbers."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Marks:
    """Elements that the forwarder knows: where x is multiplied by one of them, a function of it comes out."""

    power: mx.array
    silu: mx.array


_lock = threading.Lock()
_marks: list[Marks | None] = []
"""What `prepare` has found, once for the process. The forwarder has their addresses."""


def prepare() -> Marks | None:
    """The forwarder's functions, if this process has them.

    The first call evaluates arrays of its own; it is made before any forward is built.
    """
    with _lock:
        if not _marks:
            marks = Marks(mx.array([[math.nan]]), mx.array([[math.nan]]))
            mx.eval(marks.power, marks.silu)
            found = blas.mark(np.asarray(marks.power).ctypes.data, np.asarray(marks.silu).ctypes.data)
            if found and not _works(marks):  # MLX multiplies in another way than it did
                blas.mark(0, 0)
                found = False
            _marks.append(marks if found else None)
        return _marks[0]


def _works(marks: Marks) -> bool:
    x = mx.arange(-40.0, 40.0)[:, None]
    pairs = (x @ marks.power, 2.0**x), (x @ marks.silu, x * mx.sigmoid(x))
    return all(mx.allclose(seen, right, rtol=1e-5, atol=1e-12).item() for seen, right in pairs)


def _marks_for(x: mx.array) -> Marks | None:
    return prepare() if x.dtype == mx.float32 and mx.default_device() == mx.cpu else None


def _each(mark: mx.array, x: mx.array) -> mx.array:
    return (x.reshape(x.size, 1) @ mark).reshape(x.shape)


def power_of_two(y: mx.array) -> mx.array:
    """2 ** y, to 2e-7 of its value, for float32 y <= 127; below -126, which is nothing beside 1, what it is there."""
    marks = _marks_for(y)
    return mx.power(2.0, y) if marks is None else _each(marks.power, y)


def silu(x: mx.array) -> mx.array:
    """The gate x * sigmoid(x), which is x / (1 + exp(-x))."""
    marks = _marks_for(x)
    return x * mx.sigmoid(x) if marks is None else _each(marks.silu, x)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """The product silu(gate) * x."""
    return silu(gate) * x


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention, softmax(scale * queries keys' + mask) values, as `mx.fast.scaled_dot_product_attention`.

    Args:
        queries: (B, H, L, D). keys: (B, K, S, D). values: (B, K, S, any).
        mask: "causal", what is seen (bool) or what is added to scores, of a shape that broadcasts to (B, H, L, S). Keys
            that are hidden are numbers all the same.
        sinks: of each head; left to MLX, as is what is small, not in float32, or on a GPU.

    Returns:
        (B, H, L, any).
    """
    (batch, heads, length, _), (_, kv_heads, past, _) = queries.shape, keys.shape
    unknown = sinks is not None or (isinstance(mask, str) and (mask != "causal" or length > past))
    if unknown or batch * heads * length * past < LEAST or _marks_for(queries) is None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    shared = heads // kv_heads  # heads of queries over the same keys, whose scores are one product
    queries = (queries * (scale * LOG2_E)).reshape(batch, kv_heads, shared, length, -1)
    added = _added(mask, kv_heads, shared) if isinstance(mask, mx.array) else None
    rows = []
    for first, end in _pieces(length, max(PIECE // (batch * heads * past), -(-WORTH_PACKING // shared))):
        seen = past - length + end if isinstance(mask, str) else past
        extra = _causal(end - first, seen) if isinstance(mask, str) else _cut(added, -2, first, end)
        at_once = max(1, PIECE // (batch * shared * (end - first) * seen))
        parts = [
            _attend(
                queries[:, head : head + at_once, :, first:end],
                keys[:, head : head + at_once, :seen],
                values[:, head : head + at_once, :seen],
                _cut(extra, 1, head, head + at_once),
            )
            for head in range(0, kv_heads, at_once)
        ]
        rows.append(mx.concatenate(parts, axis=1) if len(parts) > 1 else parts[0])
    out = mx.concatenate(rows, axis=3) if len(rows) > 1 else rows[0]
    return out.reshape(batch, heads, length, -1)


def _pieces(length: int, rows: int) -> Iterator[tuple[int, int]]:
    for first in range(0, length, rows):
        yield first, min(length, first + rows)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, added: mx.array | None) -> mx.array:
    """(B, K, H/K, L, any) of queries (B, K, H/K, L, D) that are scaled for powers of two."""
    *lead, shared, length, dim = queries.shape
    past = keys.shape[2]
    scores = queries.reshape(*lead, shared * length, dim) @ keys.swapaxes(-1, -2)
    if added is not None:
        scores = (scores.reshape(*lead, shared, length, past) + added).reshape(*lead, shared * length, past)
    weights = power_of_two(scores - mx.max(scores, axis=-1, keepdims=True))
    total = mx.ones((1, past)) @ weights.swapaxes(-1, -2)  # a product is several times faster than a sum
    out = (weights @ values) / total.swapaxes(-1, -2)
    return out.reshape(*lead, shared, length, -1)


def _causal(rows: int, past: int) -> mx.array | None:
    """What is added for `rows` queries that are the last of `past` tokens: (rows, past)."""
    if rows == 1:
        return None
    later = mx.arange(past) > mx.arange(past - rows, past)[:, None]
    return later.astype(mx.float32) * HIDDEN


def _added(mask: mx.array, kv_heads: int, shared: int) -> mx.array:
    """A mask of up to four axes as what is added to (B, K, H/K, L, S) in powers of two."""
    if mask.dtype == mx.bool_:
        mask = (1.0 - mask.astype(mx.float32)) * HIDDEN
    else:
        mask = mx.maximum(mask.astype(mx.float32) * LOG2_E, HIDDEN)
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    batch, heads, length, past = mask.shape
    if heads == 1:
        return mask[:, :, None]
    return mask.reshape(batch, kv_heads, shared, length, past)


def _cut(x: mx.array | None, axis: int, first: int, end: int) -> Any:
    """x[first:end] along an axis of more than one, all of it along one that broadcasts."""
    if x is None or x.ndim < 5 or x.shape[axis] == 1:
        return x
    index: list[slice] = [slice(None)] * x.ndim
    index[axis] = slice(first, end)
    return x[tuple(index)]
