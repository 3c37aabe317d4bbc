"""The numbers of quantised arrays: int8 and int4 codes made, read, and brought into another form, with the error
measured.

An element x of a group becomes code = floor((x - bias) / scale + 1/2), and comes back as code x scale + bias. The
bias is the group's smallest element rounded down to the scales' type, and the scale is rounded up, so the codes reach
every element even where scales have but eight bits of precision, and no element is off by more than half a scale.
Groups lie along the last axis, within one token of one head.

Works on blocks that stay in a processor's cache. Pure; any thread; NumPy releases the GIL for most of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import floats, quantised
from mlxcel_nb.wire.dtypes import dtype_named

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK = 64 << 10
"""Elements at a time: with what is made of them they stay in the second cache."""

TOLERANCE = 0.02
"""Largest error, by the largest element, with which a receiver brings codes into another form unasked. Eight bits
stay below 0.6 %, four may reach 7 %: so int8 changes its groups freely, and nothing becomes int4 on its second
journey by itself."""


@dataclass(frozen=True)
class Measured:
    """How far an array that came back is from what it was. `largest` and `rms` are the array's own size."""

    max_error: float
    rms_error: float
    largest: float
    rms: float

    @property
    def relative_max(self) -> float:
        return self.max_error / self.largest if self.largest else 0.0

    @property
    def relative_rms(self) -> float:
        return self.rms_error / self.rms if self.rms else 0.0

    def __str__(self) -> str:
        return (
            f"largest error {self.max_error:.3g} ({self.relative_max:.2%} of the largest element), "
            f"root mean square {self.rms_error:.3g} ({self.relative_rms:.2%})"
        )


class _Errors:
    """Gathers a `Measured` block by block."""

    def __init__(self) -> None:
        self.max_error = self.largest = self.squares = self.own_squares = 0.0
        self.count = 0

    def add(self, was: Any, now: Any) -> None:
        import numpy as np

        off = now - was
        self.max_error = max(self.max_error, float(np.abs(off).max(initial=0)))
        self.largest = max(self.largest, float(np.abs(was).max(initial=0)))
        self.squares += float(np.square(off, dtype="<f8").sum())
        self.own_squares += float(np.square(was, dtype="<f8").sum())
        self.count += was.size

    def measured(self) -> Measured:
        count = max(1, self.count)
        return Measured(
            self.max_error, math.sqrt(self.squares / count), self.largest, math.sqrt(self.own_squares / count)
        )


def quantise(
    dtype: str,
    dims: Sequence[int],
    data: ReadableBuffer,
    *,
    bits: int,
    group: int,
    scale_type: str = "",
    measure: bool = True,
) -> tuple[memoryview, Measured | None]:
    """The data of a quantised tensor that stands for an array, and its error.

    Args:
        dtype: of the array: float32, float16 or bfloat16.
        dims: shape of the array; `group` divides the last one.
        data: the array, C-contiguous.
        bits: 8 or 4.
        scale_type: of scales and biases; the array's own where not given.
        measure: whether to work out the error, which takes about as long as the codes.

    Raises:
        WireError: another dtype, a shape that does not divide, or elements that are not finite or too large for the
        scales.
    """
    import numpy as np

    if bits not in {8, 4}:
        raise WireError(f"codes of {bits} bits are read, not made; there are 8 and 4")
    kind = dtype_named(dtype)
    out = bytearray(quantised.raw_length(kind, dims, bits, group, scale_type))
    out[:4] = quantised.prefix(bits, group, "" if scale_type == dtype else scale_type)
    parts = quantised.split(kind, dims, memoryview(out))
    elements = floats.stored(data, dtype)
    if len(elements) != math.prod(dims):
        raise WireError(f"{len(elements)} elements are no {tuple(dims)}")
    codes = np.frombuffer(parts.codes, np.uint8)
    scales, biases = floats.stored(parts.scales, parts.scale_type), floats.stored(parts.biases, parts.scale_type)
    levels = (1 << bits) - 1
    errors = _Errors() if measure else None
    at_once = max(1, BLOCK // group)
    for first in range(0, len(scales), at_once):
        rows = slice(first, min(first + at_once, len(scales)))
        x = floats.widened(elements[rows.start * group : rows.stop * group], dtype).reshape(-1, group)
        low, high = x.min(axis=1), x.max(axis=1)
        with np.errstate(all="ignore"):
            biases[rows] = floats.rounded_down(low, parts.scale_type)
            bias = floats.widened(biases[rows], parts.scale_type)
            scales[rows] = floats.rounded_up(high / levels - bias / levels, parts.scale_type)
            scale = floats.widened(scales[rows], parts.scale_type)
            if not (np.isfinite(scale).all() and np.isfinite(bias).all()):
                raise WireError(f"elements that are not finite, or too large for scales of {parts.scale_type}")
            inverse = np.where(scale > np.finfo("<f4").tiny, 1 / scale, 0).astype("<f4")
        t = x - bias[:, None]
        t *= inverse[:, None]
        t += 0.5
        q = t.astype(np.uint8)
        if bits == 8:
            codes[rows.start * group : rows.stop * group] = q.reshape(-1)
        else:
            pairs = q.reshape(-1).view("<u2")
            codes[rows.start * group // 2 : rows.stop * group // 2] = pairs | (pairs >> np.uint16(4))
        if errors is not None:
            y = q * scale[:, None]
            y += bias[:, None]
            errors.add(x, floats.widened(floats.narrowed(y, dtype), dtype))
    return memoryview(out), errors.measured() if errors is not None else None


def dequantise(dtype: str, dims: Sequence[int], data: memoryview, *, to: str = "") -> memoryview:
    """The array, as bytes of `dtype` or of another float type, that a quantised tensor stands for.

    Raises:
        WireError: the data is not laid out as it says.
    """
    import numpy as np

    parts = quantised.split(dtype_named(dtype), dims, data)
    target = to or dtype
    out = bytearray(math.prod(dims) * dtype_named(target).itemsize)
    values = floats.stored(out, target)
    scales, biases = floats.stored(parts.scales, parts.scale_type), floats.stored(parts.biases, parts.scale_type)
    group = parts.group
    at_once = max(1, BLOCK // group)
    for first in range(0, len(scales), at_once):
        rows = slice(first, min(first + at_once, len(scales)))
        q = _codes(parts, rows)
        with np.errstate(all="ignore"):
            y = q * floats.widened(scales[rows], parts.scale_type)[:, None]
            y += floats.widened(biases[rows], parts.scale_type)[:, None]
            values[rows.start * group : rows.stop * group] = floats.narrowed(y.reshape(-1), target)
    return memoryview(out)


def _codes(parts: quantised.Quantised, rows: slice) -> Any:
    """Codes of the groups `rows`, one a byte, as (rows, group)."""
    import numpy as np

    size = parts.group * parts.bits // 8
    packed = np.frombuffer(parts.codes[rows.start * size : rows.stop * size], np.uint8)
    if parts.bits == 8:
        return packed.reshape(-1, parts.group)
    if parts.bits == 4:
        pairs = packed.astype("<u2")
        return ((pairs | (pairs << np.uint16(4))) & np.uint16(0x0F0F)).view(np.uint8).reshape(-1, parts.group)
    bits = np.unpackbits(packed, bitorder="little").reshape(-1, parts.bits)
    return np.packbits(bits, axis=1, bitorder="little").reshape(-1, parts.group)


def convert(
    dtype: str, dims: Sequence[int], data: memoryview, *, bits: int, group: int, tolerance: float = TOLERANCE
) -> tuple[memoryview, Measured]:
    """Quantised data in the `bits` and `group` that a receiver keeps, and what that cost.

    Smaller groups and more bits are exact: scales are repeated, codes widened. Anything coarser is quantised anew.

    Raises:
        WireError: the error is above `tolerance` (relative to the largest element); both forms are named.
    """
    import numpy as np

    kind = dtype_named(dtype)
    parts = quantised.split(kind, dims, data)
    scale_type = "" if parts.scale_type == dtype else parts.scale_type
    if (parts.bits, parts.group) == (bits, group):
        return data, Measured(0.0, 0.0, 0.0, 0.0)
    if parts.group % group == 0 and bits in {parts.bits, 8}:
        out = bytearray(quantised.raw_length(kind, dims, bits, group, scale_type))
        out[:4] = quantised.prefix(bits, group, scale_type)
        new = quantised.split(kind, dims, memoryview(out))
        if parts.bits == bits:
            new.codes[:] = parts.codes
        else:
            new.codes[:] = _codes(parts, slice(0, math.prod(dims) // parts.group)).reshape(-1).data
        repeats = parts.group // group
        for old, fresh in ((parts.scales, new.scales), (parts.biases, new.biases)):
            floats.stored(fresh, parts.scale_type)[:] = np.repeat(floats.stored(old, parts.scale_type), repeats)
        return memoryview(out), Measured(0.0, 0.0, 0.0, 0.0)
    plain = dequantise(dtype, dims, data)
    made, measured = quantise(dtype, dims, plain, bits=bits, group=group, scale_type=scale_type)
    assert measured is not None
    if measured.relative_max > tolerance:
        raise WireError(
            f"a cache of int{parts.bits} in groups of {parts.group} comes to one of int{bits} in groups of {group}: "
            f"{measured}; at most {tolerance:.1%} are taken"
        )
    return made, measured
