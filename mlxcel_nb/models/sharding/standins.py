"""What a module of a cut block does otherwise than in the whole model: it adds up over the ranks. For the MLX thread.

A stand-in is the module itself in a subclass of its own class, so what asks for its type, its weights or its
attributes finds what it knows, and weights keep their names. Put on once the weights are in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

AllReduce = Callable[[mx.array], mx.array]


class Summed:
    """What a module gives is a rank's part of a sum."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._all_reduce(super().__call__(*args, **kwargs))  # type: ignore[misc, attr-defined]


class SpreadNorm:
    """An RMS norm over features that are spread over the ranks: the squares are added up, each counted once."""

    __slots__ = ()

    def __call__(self, x: Any) -> Any:
        wide = x.astype(mx.float32)
        squares = mx.square(wide).sum(-1, keepdims=True)
        if not self._counts:  # type: ignore[attr-defined]
            squares = mx.zeros_like(squares)
        mean = self._all_reduce(squares) / self._width  # type: ignore[attr-defined]
        return (wide * mx.rsqrt(mean + self.eps)).astype(x.dtype) * self.weight  # type: ignore[attr-defined]


def summed(module: Any, all_reduce: AllReduce) -> None:
    """Add up what `module` gives."""
    become(module, Summed, all_reduce=all_reduce)


def become(module: Any, stand_in: type, **figures: Any) -> None:
    """Turn `module` into a subclass of its class that puts `stand_in` first."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (stand_in, kind), {"__module__": kind.__module__})
    for name, value in figures.items():
        setattr(module, f"_{name}", value)


class SpreadExperts:
    """Some of the experts: what a token asks of those on other ranks is nothing here, and added up over the ranks."""

    __slots__ = ()

    def __call__(self, x: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        local = indices.astype(mx.int32) - self._first  # type: ignore[attr-defined]
        here = (local >= 0) & (local < self._count)  # type: ignore[attr-defined]
        out = super().__call__(x, mx.where(here, local, 0), *args, **kwargs)  # type: ignore[misc]
        out = mx.where(here[..., None], out, mx.zeros((), out.dtype))
        return self._all_reduce(out) if self._all_reduce is not None else out  # type: ignore[attr-defined]


def spread_experts(module: Any, all_reduce: AllReduce, *, first: int, count: int, sums: bool) -> None:
    """Make a mixture's stacked experts answer for those from `first` on, `count` of them."""
    become(module, SpreadExperts, all_reduce=all_reduce if sums else None, first=first, count=count)
