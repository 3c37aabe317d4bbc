"""Notes what a run gave: logits where tokens are told, and a sketch of every layer's output.

A sketch is what a handful of random directions see of a vector (Johnson and Lindenstrauss 1984): K figures in place of
D, whose differences are as long as those of the whole vectors, but for some tens of percent. That is enough to say
which layer is the first to differ, and small enough to bring from engines for every layer and position. `Recorder` is
for the MLX thread; `sketch` and `directions` are pure.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import mlx.core as mx

K = 16
"""Directions: a difference that all of them miss does not occur by chance."""


class Recorder:
    """Takes a part's layer outputs, step by step; `LoadedPart.forward` is given `on_layer`.

    Attributes:
        steps: by layer, what each step gave, (positions, K).
    """

    def __init__(self) -> None:
        self.steps: dict[int, list[np.ndarray]] = {}

    def on_layer(self, index: int, output: mx.array) -> None:
        """A layer's output, whose last axis is the model's width."""
        self.steps.setdefault(index, []).append(sketch(as_floats(output)))

    @property
    def layers(self) -> dict[int, np.ndarray]:
        """All that each layer gave so far, (positions, K)."""
        return {index: np.concatenate(steps) for index, steps in self.steps.items()}


def as_floats(x: mx.array) -> np.ndarray:
    """`x` in float32, evaluated."""
    import mlx.core as mx

    return np.array(x.astype(mx.float32))


def sketch(output: np.ndarray) -> np.ndarray:
    """What the directions see: (..., D) becomes (positions, K)."""
    flat = output.reshape(-1, output.shape[-1])
    seen: np.ndarray = flat @ directions(output.shape[-1])
    return seen


@functools.lru_cache(maxsize=8)
def directions(width: int) -> np.ndarray:
    """K random vectors of signs, scaled by 1/sqrt(D): the same wherever and by whatever version they are made."""
    drawn = hashlib.shake_128(b"mlxcel_nb layer sketch").digest(-(-width * K // 8))
    signs = np.unpackbits(np.frombuffer(drawn, np.uint8))[: width * K].reshape(width, K)
    return (signs.astype(np.float32) * 2 - 1) / np.float32(math.sqrt(width))
