"""Random weights that depend on a weight's name, its shape and a seed, and on nothing else.

So any split of a model, in whatever process, can be given the very weights of the whole: draw by the whole's name and
shape, then cut. The scales keep activations near one through every layer and logits a few units apart. For the MLX
thread, as all that makes arrays.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcel_nb.models.catalogue.entry import Draw

ONES = re.compile(r"(norm\w*|(^|\.)ln\w*|_ln)(\.\d+)?\.weight$|(^|\.)(D|norm_f\.weight|gamma)$")
"""Factors, which lie near one."""

EMBEDDINGS = re.compile(r"(^|\.)(embed\w*|wte|wpe|word_embeddings|tok_embeddings|\w*embedding\w*)\.weight$")


def draw(name: str, shape: Sequence[int], seed: int, special: Sequence[Draw] = (), packed: str = "") -> np.ndarray:
    """The weight `name` in float32.

    Args:
        special: what an entry wants otherwise; the first expression that is found in the name counts.
        packed: "uint8" or "uint32" for a weight that is quantised, whose every bit pattern is one.
    """
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    rng = np.random.default_rng(int.from_bytes(digest))
    if packed:
        return rng.integers(0, np.iinfo(packed).max, shape, packed, endpoint=True)
    for expression, mean, deviation in special:
        if re.search(expression, name):
            return _normal(rng, shape, mean, deviation)
    leaf = name.rpartition(".")[2]
    if leaf == "signs":
        return rng.choice(np.array([-1.0, 1.0], np.float32), shape)
    if leaf == "A_log":  # decays of 1 to 8 a unit of time
        return rng.uniform(0.0, math.log(8.0), shape).astype(np.float32)
    if leaf == "dt_bias" or name.endswith("dt_proj.bias"):  # steps of about 0.02 to 0.3 after the softplus
        return rng.uniform(-4.0, -1.0, shape).astype(np.float32)
    if ONES.search(name):
        return _normal(rng, shape, 1.0, 0.1)
    if len(shape) < 2 or leaf == "bias":
        return _normal(rng, shape, 0.0, 0.1)
    if EMBEDDINGS.search(name):
        return _normal(rng, shape, 0.0, 3.0 / math.sqrt(shape[-1]))
    if "conv" in name and len(shape) == 3:  # (channels, width, inputs of each channel)
        return _normal(rng, shape, 0.0, 1.0 / math.sqrt(shape[1] * shape[2]))
    return _normal(rng, shape, 0.0, 1.0 / math.sqrt(shape[-1]))


def _normal(rng: np.random.Generator, shape: Sequence[int], mean: float, deviation: float) -> np.ndarray:
    return np.asarray(rng.standard_normal(tuple(shape), np.float32) * deviation + mean, np.float32)


def draw_all(arrays: dict[str, Any], seed: int, special: Sequence[Draw] = ()) -> dict[str, mx.array]:
    """A weight for each name in `arrays`, whose shapes are taken and whose values are never computed."""
    drawn = {}
    for name, array in arrays.items():
        packed = "" if mx.issubdtype(array.dtype, mx.floating) else str(array.dtype).rpartition(".")[2]
        drawn[name] = mx.array(draw(name, array.shape, seed, special, packed))
    return drawn
