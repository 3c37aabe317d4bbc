"""Packed numbers decode as a second implementation (the `gguf` package) and MLX itself decode them."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mlxcel_nb.models.gguf_blocks import AFFINE_TYPES, READABLE_TYPES, decode, to_affine
from mlxcel_nb.models.gguf_file import TENSOR_TYPES

SHAPE = (6, 512)
FLOAT16_FIELDS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}
"""Byte offsets of the float16 in a block; the other types have two at the front."""


def random_blocks(kind: str) -> np.ndarray:
    """Random codes under scales of a sensible size, as (rows, bytes)."""
    rng = np.random.default_rng(7)
    if kind in ("F32", "F16", "BF16"):
        values = rng.standard_normal(SHAPE).astype(np.float16 if kind == "F16" else np.float32)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.view(np.uint8)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (SHAPE[0] * SHAPE[1] // block, size), dtype=np.uint8)
    for at in FLOAT16_FIELDS.get(kind, (0, 2)):
        raw[:, at : at + 2] = rng.uniform(-0.1, 0.1, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(SHAPE[0], -1)


@pytest.mark.parametrize("kind", sorted(READABLE_TYPES))
def test_every_type_decodes_as_the_gguf_package_does(kind: str) -> None:
    raw = random_blocks(kind)
    want = gguf.quants.dequantize(raw, GGMLQuantizationType[kind]).reshape(SHAPE)
    got = decode(kind, raw, SHAPE)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", sorted(AFFINE_TYPES))
def test_the_affine_layout_holds_the_same_numbers(kind: str) -> None:
    raw = random_blocks(kind)
    affine = to_affine(kind, raw, SHAPE)
    got = mx.dequantize(
        mx.array(affine.packed),
        mx.array(affine.scales.astype(np.float32)),
        mx.array(affine.biases.astype(np.float32)),
        group_size=32,
        bits=affine.bits,
    )
    np.testing.assert_array_equal(np.array(got), decode(kind, raw, SHAPE))


def test_the_table_of_types_is_the_specifications() -> None:
    for number, packing in TENSOR_TYPES.items():
        assert (packing.block, packing.size) == GGML_QUANT_SIZES[GGMLQuantizationType(number)]
        assert packing.name == GGMLQuantizationType(number).name
