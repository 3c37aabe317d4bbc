"""Ours stand in files of mlx-lm's where mlx-lm's own functions did, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models import activations, base

from mlxcel_nb.models import processor
from mlxcel_nb.models.stand_ins import ATTENTION, Attention, files_of, stand_in

OWN = f"{__name__}_own"


@pytest.fixture
def own() -> Iterator[ModuleType]:
    """A file with a module."""
    file = ModuleType(OWN)
    file.Block = type("Block", (nn.Module,), {"__module__": OWN})  # type: ignore[attr-defined]
    sys.modules[OWN] = file
    yield file
    del sys.modules[OWN]


def test_a_file_s_own_functions_stay(own: Any) -> None:
    def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return queries + keys + values

    own.scaled_dot_product_attention = attend
    own.swiglu = attend
    stand_in(own.Block())
    assert own.scaled_dot_product_attention is own.swiglu is attend


def test_mlx_lm_s_are_replaced_once(own: Any) -> None:
    own.scaled_dot_product_attention, own.swiglu = base.scaled_dot_product_attention, activations.swiglu
    assert files_of(own.Block()) == [own]
    stand_in(own.Block())
    attention = own.scaled_dot_product_attention
    assert isinstance(attention, Attention) and own.swiglu is processor.swiglu
    stand_in(own.Block())
    assert getattr(own, ATTENTION) is attention
    x = mx.random.normal((1, 4, 60, 16))
    found = attention(x, x, x, None, 0.25, "causal")
    assert mx.allclose(found, mx.fast.scaled_dot_product_attention(x, x, x, scale=0.25, mask="causal"), atol=1e-5)


def test_quantised_keys_are_left_to_mlx_lm(own: Any) -> None:
    class Cache:
        bits, group_size = 8, 64

    own.scaled_dot_product_attention = base.scaled_dot_product_attention
    stand_in(own.Block())
    queries, keys = mx.random.normal((1, 2, 3, 64)), mx.random.normal((1, 2, 9, 64))
    packed = mx.quantize(keys, group_size=64, bits=8)
    right = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.1)
    found = own.scaled_dot_product_attention(queries, packed, packed, Cache(), scale=0.1, mask=None)
    assert mx.allclose(found, right, atol=0.05)
