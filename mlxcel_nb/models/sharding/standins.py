"""What a module of a cut block does otherwise than in the whole model: it adds up over the ranks. For the MLX thread.

A stand-in is the module itself in a subclass of its own class, so what asks for its type, its weights or its
attributes finds what it knows, and weights keep their names. Put on once the weights are in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn

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


class SpreadGatedNorm:
    """`SpreadNorm` for norms that are given a gate, before or after which they work."""

    __slots__ = ()

    def __call__(self, x: Any, gate: Any = None) -> Any:
        if gate is not None and not self._norm_first:  # type: ignore[attr-defined]
            x = nn.silu(gate) * x
        wide = x.astype(mx.float32)
        mean = self._all_reduce(mx.square(wide).sum(-1, keepdims=True)) / self._width  # type: ignore[attr-defined]
        x = (wide * mx.rsqrt(mean + self._epsilon)).astype(x.dtype) * self.weight  # type: ignore[attr-defined]
        return nn.silu(gate) * x if gate is not None and self._norm_first else x  # type: ignore[attr-defined]


class MaskedByHead:
    """Block-sparse attention whose mask depends on the number of each head: made for all, of which a rank has some."""

    __slots__ = ()

    def _block_sparse_mask(self, q_len: int, kv_len: int) -> Any:
        first, last = self._queries  # type: ignore[attr-defined]
        keys, group = self.n_kv_heads, self.n_q_per_kv  # type: ignore[attr-defined]
        masks = self._whole(q_len, kv_len)  # type: ignore[attr-defined]
        return tuple(mask.flatten(0, 1)[first:last].reshape(keys, group, *mask.shape[2:]) for mask in masks)


class Claimed:
    """An input that says it is as wide as a rank's heads; the products of the block take what it stands for."""

    def __init__(self, array: mx.array, width: int) -> None:
        self.array = array
        self.shape = (*array.shape[:-1], width)
        self.dtype = array.dtype


class Narrowed:
    """A block that takes the width of its heads from its input."""

    __slots__ = ()

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(Claimed(x, self._claim), *args, **kwargs)  # type: ignore[misc, attr-defined]


class Unwrapping:
    """A product that is given such an input."""

    __slots__ = ()

    def __call__(self, x: Any) -> Any:
        return super().__call__(x.array if isinstance(x, Claimed) else x)  # type: ignore[misc]


def claim_width(module: Any, _: AllReduce, *, width: int, products: list[str]) -> None:
    """Have `module` believe that its input is `width` wide, and `products` of its know better."""
    become(module, Narrowed, claim=width)
    for name in products:
        become(module[name], Unwrapping)


class HeldBack:
    """The first of two parts of a layer that are added together: it waits for the second, and there is one sum."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        self._pair["first"] = out  # type: ignore[attr-defined]
        return mx.zeros((1,) * out.ndim, out.dtype)


class Together:
    """The second of them."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return self._all_reduce(out + self._pair.pop("first"))  # type: ignore[attr-defined]


class Scattered:
    """A product whose outputs lie among zeros where the whole's would, for a block that insists on all of them."""

    __slots__ = ()

    def __call__(self, x: Any) -> Any:
        first, last, total = self._place  # type: ignore[attr-defined]
        out = super().__call__(x)  # type: ignore[misc]
        return mx.pad(out, [(0, 0)] * (out.ndim - 1) + [(first, total - last)])


class Sliced:
    """A product that is given all inputs and takes a rank's of them; its outputs are added up."""

    __slots__ = ()

    def __call__(self, x: Any) -> Any:
        first, last = self._span  # type: ignore[attr-defined]
        return self._all_reduce(super().__call__(x[..., first:last]))  # type: ignore[misc, attr-defined]


def together(first: Any, second: Any, all_reduce: AllReduce) -> None:
    """Add up what two modules give, the first called before the second, in one sum. Neither has a stand-in yet."""
    pair: dict[str, Any] = {}
    become(first, HeldBack)
    become(second, Together, all_reduce=all_reduce)
    # Not by `setattr`, which would count a table among the module's parameters.
    object.__setattr__(first, "_pair", pair)
    object.__setattr__(second, "_pair", pair)


def scattered(module: Any, _: AllReduce, *, place: tuple[int, int, int]) -> None:
    """Put a product's outputs, `place[0]` to `place[1]` of `place[2]`, where they belong."""
    become(module, Scattered)
    object.__setattr__(module, "_place", place)


def sliced(module: Any, all_reduce: AllReduce, *, span: tuple[int, int]) -> None:
    """Have a product take `span` of its inputs."""
    become(module, Sliced, all_reduce=all_reduce)
    object.__setattr__(module, "_span", span)
