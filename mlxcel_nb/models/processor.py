"""Attention and gates on a processor, made of the operations that MLX has vectorised there.

MLX's CPU build adds and multiplies many numbers at a time, but takes exponentials one by one and chooses (`where`) one
by one: some 12 and 5 ns each, where a product is 0.2 ns. Of a prompt's time that was a quarter, of a long one's half.
Here an exponential is a power of two from a polynomial and a shift of its exponent, as in Cephes' `exp2f`, and large
tables of scores are worked on in pieces that stay in a core's cache. Any thread.

Shapes: B sequences, H heads of queries, K of keys, L queries, S keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

LEAST = 1 << 15
"""Elements from which on this is faster than MLX: below, the time goes into the number of operations."""
PIECE = 1 << 17
"""Elements of one operand that a core's cache holds beside the others."""
WORTH_PACKING = 128
"""Rows of a product for which BLAS packs the other operand without spending much of its time on that."""
HIDDEN = -1e30
"""Added to the score of a key that is not seen. Finite, so that a row that sees none gives numbers."""
LOWEST = -125.0
"""The smallest exponent of two that a result is given; float32 has none below -126."""
LOG2_E = 1.4426950408889634

POWER = (1.0, 0.3465708297, 0.060030532857, 0.0068600163655, 0.00050715995312)
"""2 ** (f / 2) for -1 < f <= 0 to 1e-7: coefficients of f ** 0 to 4, fitted to the relative error, exact at 0."""


def _worth_it(elements: int, x: mx.array) -> bool:
    return elements >= LEAST and x.dtype == mx.float32 and mx.default_device() == mx.cpu


def power_of_two(y: mx.array) -> mx.array:
    """2 ** y for float32 y <= 0, to 5e-7 of its value; below 2 ** -125, which is nothing beside 1, that."""
    y = mx.maximum(y, LOWEST)
    whole = y.astype(mx.int32)  # towards zero
    part = y - whole
    root = part * POWER[4] + POWER[3]
    for coefficient in POWER[2::-1]:
        root = root * part + coefficient
    return ((root * root).view(mx.int32) + (whole << 23)).view(mx.float32)


def silu(x: mx.array) -> mx.array:
    """The gate x * sigmoid(x), which is max(x, 0) - |x| e / (1 + e) with e = exp(-|x|)."""
    if not _worth_it(x.size, x):
        return x * mx.sigmoid(x)
    size = mx.abs(x)
    power = power_of_two(size * -LOG2_E)
    return mx.maximum(x, 0.0) - size * power / (power + 1.0)


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
    if unknown or not _worth_it(batch * heads * length * past, queries):
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
