"""GGUF's packed numbers as arrays: decoded to float32, or repacked unchanged into MLX's affine layout.

Pure NumPy, so a conversion touches no MLX stream and any thread may run it. MLX's own reader is not used: 0.32 decodes
every second sub-block of Q4_K with its neighbour's scale, and reads neither Q3_K nor Q5_K nor Q5_0. The layouts are
those of the ggml project's `block_*` structures; all take raw bytes as a uint8 array (blocks, bytes of a block).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlxcel_nb.models.gguf_file import TENSOR_TYPES

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Affine(NamedTuple):
    """A matrix in MLX's affine layout: value = scale * q + bias, one scale and bias to a group of 32 in a row."""

    packed: NDArray[np.uint32]
    scales: NDArray[np.float16]
    biases: NDArray[np.float16]
    bits: int


AFFINE_TYPES = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""Types that MLX's layout holds without loss, and their bits."""

AFFINE_GROUP = 32


def decode(kind: str, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """`raw` bytes of a tensor of type `kind` as float32, `shape` rows first."""
    blocks = raw.reshape(-1, _BLOCK_BYTES[kind])
    return _DECODERS[kind](blocks).astype(np.float32, copy=False).reshape(shape)


def to_affine(kind: str, raw: Bytes, shape: tuple[int, ...]) -> Affine:
    """`raw` bytes of a tensor of a type in AFFINE_TYPES as MLX stores it, bit for bit the same numbers."""
    blocks = raw.reshape(-1, _BLOCK_BYTES[kind])
    *rows, columns = shape
    scales = _half(blocks, 0)
    if kind == "Q8_0":
        packed = blocks[:, 2:] ^ np.uint8(128)  # int8 to uint8 + 128
        biases = scales * np.float16(-128)
    else:
        codes = _nibbles(blocks[:, -16:])
        packed = codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)
        biases = _half(blocks, 2) if kind == "Q4_1" else scales * np.float16(-8)
    groups = (*rows, columns // AFFINE_GROUP)
    return Affine(
        np.ascontiguousarray(packed).view(np.uint32).reshape(*rows, -1),
        scales.reshape(groups),
        biases.reshape(groups),
        AFFINE_TYPES[kind],
    )


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 at byte `at` of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _scale(blocks: Bytes, at: int) -> Floats:
    return _half(blocks, at).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Low halves of all bytes, then high halves: how the 32-number blocks lie."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return _scale(blocks, 0)


def _bf16(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32)
    return (high << 16).view(np.float32)


def _q4_0(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _scale(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _scale(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _scale(blocks, 0) * codes.astype(np.float32) + _scale(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _scale(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


# The K types: 256 numbers to a block, in sub-blocks of 16 or 32 with small scales of their own.


def _two_bits(packed: Bytes) -> Bytes:
    """(n, 64) bytes to (n, 256) codes: each half of 32 bytes holds four runs of 32, lowest bits first."""
    halves = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return (halves & np.uint8(3)).reshape(-1, 256)


def _high_bits(mask: Bytes) -> Bytes:
    """(n, 32) bytes to (n, 256) bits: bit k of byte i belongs to number 32 k + i."""
    bits = mask.reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    return (bits & np.uint8(1)).reshape(-1, 256)


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """The 8 scales and 8 minima of Q4_K and Q5_K, out of 12 bytes."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _apply(codes: NDArray[np.generic], scales: Floats, minima: Floats | None = None) -> Floats:
    """`scales * codes - minima`, with one scale and minimum to each run of equal length."""
    count = scales.shape[1]
    runs = codes.astype(np.float32).reshape(-1, count, 256 // count) * scales[:, :, None]
    return (runs if minima is None else runs - minima[:, :, None]).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> Floats:
    small = blocks[:, :16]
    scales = _scale(blocks, 80) * (small & 15).astype(np.float32)
    minima = _scale(blocks, 82) * (small >> 4).astype(np.float32)
    return _apply(_two_bits(blocks[:, 16:80]), scales, minima)


def _q3_k(blocks: Bytes) -> Floats:
    packed = blocks[:, 96:108]
    low = _nibbles(packed[:, :8])
    high = (packed[:, None, 8:12] >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)).reshape(-1, 16) & 3
    scales = _scale(blocks, 108) * ((low | high << 4).astype(np.float32) - 32)
    codes = _two_bits(blocks[:, 32:96]).astype(np.int8) - 4 * (1 - _high_bits(blocks[:, :32]).astype(np.int8))
    return _apply(codes, scales)


def _pairs_of_nibbles(packed: Bytes) -> Bytes:
    """(n, 128) bytes to (n, 256) codes: each 32 bytes hold a run of 32 low halves, then one of high halves."""
    runs = packed.reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (runs & np.uint8(15)).reshape(-1, 256)


def _q4_k(blocks: Bytes) -> Floats:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    return _apply(_pairs_of_nibbles(blocks[:, 16:]), _scale(blocks, 0) * scales, _scale(blocks, 2) * minima)


def _q5_k(blocks: Bytes) -> Floats:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    codes = _pairs_of_nibbles(blocks[:, 48:]) | _high_bits(blocks[:, 16:48]) << 4
    return _apply(codes, _scale(blocks, 0) * scales, _scale(blocks, 2) * minima)


def _q6_k(blocks: Bytes) -> Floats:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    codes = (low & 15).reshape(-1, 256) | _two_bits(blocks[:, 128:192]) << 4
    scales = _scale(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _apply(codes.astype(np.int8) - 32, scales)


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_BLOCK_BYTES = {packing.name: packing.size for packing in TENSOR_TYPES.values()}

READABLE_TYPES = frozenset(_DECODERS)
"""Tensor types that can be converted."""
