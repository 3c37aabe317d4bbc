"""Rotary positions on a processor: the angles of a step are made once, for all layers, queries and keys.

MLX's CPU build makes them anew at each call, from some fifteen small operations. For the MLX thread.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
from mlx import nn

Angled = tuple[mx.array, mx.array]
"""Cosines, twice, and sines, the first half of them negative: each (L, dims), or (B, 1, L, dims)."""


class Angles:
    """The latest angles of a forward, for all layers that turn alike.

    Args:
        rope: how they do.
    """

    def __init__(self, rope: nn.RoPE) -> None:
        self._half, self._base, self._scale = rope.dims // 2, rope.base, rope.scale
        self._latest: tuple[int | mx.array, int, Angled] | None = None

    def of(self, offset: int | mx.array, length: int) -> Angled:
        """Angles of `length` tokens, at a position or, for B sequences, at (B,).

        An array is known again by being the same object, whose numbers may be others in another forward: all is
        forgotten after each. Nothing counts one up in place between two layers.
        """
        if self._latest is not None:
            known, of_length, angled = self._latest
            numbers = isinstance(offset, int) and isinstance(known, int)
            if length == of_length and (offset == known if numbers else offset is known):
                return angled
        angled = self._make(offset, length)
        self._latest = (offset, length, angled)
        return angled

    def forget(self) -> None:
        """A forward is over."""
        self._latest = None

    def _make(self, offset: int | mx.array, length: int) -> Angled:
        frequencies = mx.exp(mx.arange(self._half) * (-math.log(self._base) / self._half))
        first = offset[:, None, None] if isinstance(offset, mx.array) and offset.ndim else offset
        turns = ((mx.arange(length) + first) * self._scale)[..., None] * frequencies
        cosines, sines = mx.cos(turns), mx.sin(turns)
        return mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)


class Rotary(nn.RoPE):
    """An `nn.RoPE` that turns in halves, faster in float32.

    Args:
        rope: how it turns.
        angles: of all that turn like it.
    """

    def __init__(self, rope: nn.RoPE, angles: Angles) -> None:
        super().__init__(rope.dims, rope.traditional, rope.base, rope.scale)
        self._angles = angles

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Turn `x`, (B, H, L, D) with D at least `dims`."""
        if x.ndim != 4 or x.dtype != mx.float32:
            return super().__call__(x, offset=offset)  # type: ignore[arg-type]  # an array will do
        (cosines, sines), half = self._angles.of(offset, x.shape[-2]), self.dims // 2
        turning = x[..., : self.dims] if x.shape[-1] > self.dims else x
        swapped = mx.concatenate([turning[..., half:], turning[..., :half]], axis=-1)
        turned = turning * cosines + swapped * sines
        return mx.concatenate([turned, x[..., self.dims :]], axis=-1) if x.shape[-1] > self.dims else turned


def stand_in(model: Any) -> list[Angles]:
    """Put ours where the model's modules have an `nn.RoPE` that turns in halves; the angles of all of them."""
    angles: dict[tuple[int, float, float], Angles] = {}
    for module in model.modules():
        for name, rope in list(module.items()):
            if type(rope) is nn.RoPE and not rope.traditional:
                alike = angles.setdefault((rope.dims, rope.base, rope.scale), Angles(rope))
                module[name] = Rotary(rope, alike)
    return list(angles.values())
