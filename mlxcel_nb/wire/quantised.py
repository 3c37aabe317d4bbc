"""Quantised arrays as bytes: affine codes in groups along the last axis, packed as `mx.quantize` packs them.

A tensor with the quantised flag keeps the dims and dtype of the array it stands for. Its data is

    bits u8 | scale type u8 | group u16 | codes | scales | biases

codes: little-endian uint32 words, `bits` bits an element, each row packed for itself; scales and biases: one a group.
An element is code x scale + bias. Pure; any thread; `wire.quantising` makes and reads the numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire.dtypes import DType, dtype_named

BITS = frozenset({2, 3, 4, 5, 6, 8})
GROUPS = frozenset({16, 32, 64, 128})
FLOATS = ("float32", "float16", "bfloat16")

_PREFIX = struct.Struct("!BBH")
_SCALE_TYPES = ("", *FLOATS)
"""By code; the first is the array's own type."""


class Quantised(NamedTuple):
    bits: int
    group: int
    codes: memoryview
    scales: memoryview
    biases: memoryview
    scale_type: str


def prefix(bits: int, group: int, scale_type: str = "") -> bytes:
    """What leads the data; `scale_type` is the type of scales and biases where it is not the array's own."""
    return _PREFIX.pack(bits, _SCALE_TYPES.index(scale_type), group)


def raw_length(dtype: DType, dims: Sequence[int], bits: int, group: int, scale_type: str = "") -> int:
    """Bytes of the whole data, prefix and all."""
    codes, scales = _sizes(dtype, dims, bits, group, scale_type)
    return _PREFIX.size + codes + 2 * scales


def max_raw_length(dims: Sequence[int]) -> int:
    """No layout of such an array is longer; a bound for data that is still compressed."""
    return _PREFIX.size + math.prod(dims) + 2 * math.prod(dims) // min(GROUPS) * 4


def split(dtype: DType, dims: Sequence[int], data: memoryview) -> Quantised:
    """The three arrays in `data`, which must be exactly as long as its own prefix, the dims and the dtype say."""
    if len(data) < _PREFIX.size:
        raise WireError(f"a quantised tensor of {len(data)} bytes")
    bits, code, group = _PREFIX.unpack_from(data)
    if code >= len(_SCALE_TYPES):
        raise WireError(f"a quantised tensor with scales of unknown type {code}")
    scale_type = _SCALE_TYPES[code] or dtype.name
    codes, scales = _sizes(dtype, dims, bits, group, scale_type)
    expected = _PREFIX.size + codes + 2 * scales
    if len(data) != expected:
        raise WireError(
            f"a quantised tensor of {len(data)} bytes; {tuple(dims)} {dtype.name} in {bits} bits, group {group}, "
            f"take {expected}"
        )
    at = _PREFIX.size
    codes_, scales_ = data[at : at + codes], data[at + codes : at + codes + scales]
    return Quantised(bits, group, codes_, scales_, data[at + codes + scales :], scale_type)


def _sizes(dtype: DType, dims: Sequence[int], bits: int, group: int, scale_type: str) -> tuple[int, int]:
    if bits not in BITS or group not in GROUPS:
        raise WireError(f"a quantised tensor of {bits} bits in groups of {group}")
    if dtype.name not in FLOATS:
        raise WireError(f"a quantised tensor of {dtype.name}")
    if not dims or dims[-1] % group or dims[-1] * bits % 32:
        raise WireError(f"a quantised tensor {tuple(dims)} does not divide into groups of {group}")
    elements = math.prod(dims)
    itemsize = dtype_named(scale_type).itemsize if scale_type else dtype.itemsize
    return elements * bits // 8, elements // group * itemsize
