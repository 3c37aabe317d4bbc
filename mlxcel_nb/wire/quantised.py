"""Quantised arrays: affine codes in groups along the last axis, as `mx.quantize` lays them out.

A tensor with the quantised flag keeps the dims and dtype of the array it stands for. Its data is

    bits u8 | zero u8 | group u16 | codes | scales | biases

codes: little-endian uint32 words, `bits` bits an element, each row packed for itself; scales and biases: one of the
tensor's dtype a group. Pure; any thread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire.dtypes import DType

_PREFIX = struct.Struct("!BBH")
_BITS = frozenset({2, 3, 4, 5, 6, 8})
_GROUPS = frozenset({16, 32, 64, 128})
_FLOATS = frozenset({"float32", "float16", "bfloat16"})


class Quantised(NamedTuple):
    bits: int
    group: int
    codes: memoryview
    scales: memoryview
    biases: memoryview


def prefix(bits: int, group: int) -> bytes:
    """What leads the data."""
    return _PREFIX.pack(bits, 0, group)


def raw_length(dtype: DType, dims: Sequence[int], bits: int, group: int) -> int:
    """Bytes of the whole data, prefix and all."""
    codes, scales = _sizes(dtype, dims, bits, group)
    return _PREFIX.size + codes + 2 * scales


def max_raw_length(dtype: DType, dims: Sequence[int]) -> int:
    """No layout of such an array is longer; a bound for data that is still compressed."""
    return _PREFIX.size + math.prod(dims) + 2 * math.prod(dims) // min(_GROUPS) * dtype.itemsize


def split(dtype: DType, dims: Sequence[int], data: memoryview) -> Quantised:
    """The three arrays in `data`, which must be exactly as long as its own prefix, the dims and the dtype say."""
    if len(data) < _PREFIX.size:
        raise WireError(f"a quantised tensor of {len(data)} bytes")
    bits, zero, group = _PREFIX.unpack_from(data)
    if zero:
        raise WireError("a quantised tensor of unknown layout")
    codes, scales = _sizes(dtype, dims, bits, group)
    if len(data) != _PREFIX.size + codes + 2 * scales:
        raise WireError(
            f"a quantised tensor of {len(data)} bytes; {tuple(dims)} {dtype.name} in {bits} bits, group {group}, "
            f"take {_PREFIX.size + codes + 2 * scales}"
        )
    at = _PREFIX.size
    return Quantised(
        bits, group, data[at : at + codes], data[at + codes : at + codes + scales], data[at + codes + scales :]
    )


def _sizes(dtype: DType, dims: Sequence[int], bits: int, group: int) -> tuple[int, int]:
    if bits not in _BITS or group not in _GROUPS:
        raise WireError(f"a quantised tensor of {bits} bits in groups of {group}")
    if dtype.name not in _FLOATS:
        raise WireError(f"a quantised tensor of {dtype.name}")
    if not dims or dims[-1] % group or dims[-1] * bits % 32:
        raise WireError(f"a quantised tensor {tuple(dims)} does not divide into groups of {group}")
    elements = math.prod(dims)
    return elements * bits // 8, elements // group * dtype.itemsize
