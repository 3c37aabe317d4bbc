"""A run of a model over a few tokens that nobody evaluates, watched: what each layer keeps, sums up and chooses.

Weights are zeros that take no memory, and MLX builds the graph with shapes and dtypes alone. So mlx-lm's own caches are
filled as they would be, and can be measured, whatever the size of the model. For the MLX thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlxcel_nb.plan.facts import Growth

TOKENS = 8
"""Of the run. Short, as some recurrences are unrolled token by token."""

LONG = 1024
"""Tokens of two more runs, with this many and twice as many, for caches of a kind that is not known."""


class Look:
    """What a run of `model` shows.

    Args:
        layers: the model's decoder layers; [] where they are not known, and all counts for the first.
        chunk: tokens of a prompt that are read at once.

    Attributes:
        width: bytes of what a layer hands on of one token; 0 where it is not known.
        note: what a user should know about it.
        caches: by layer.
        sums: by layer, bytes of each all-reduce for one token.
        chosen: share of its experts that one token goes to, by id of the module that holds them.
    """

    def __init__(self, model: Any, layers: Sequence[Any], *, heads: int, chunk: int) -> None:
        self._model, self._heads, self._chunk = model, heads, chunk
        self._layer, self._n_layers = 0, max(1, len(layers))
        self._owners: dict[int, int] = {}
        self._held: list[Any] = []
        self._empty: list[int] = []
        self.width = 0
        self.note = ""
        self.caches: dict[int, list[Growth]] = {}
        self.sums: dict[int, list[int]] = {}
        self.chosen: dict[str, float] = {}
        self._tokens = TOKENS
        for index, layer in enumerate(layers):
            _spy(layer, self._around(index))
        for path, module in model.named_modules():
            if _has_experts(module):
                _spy(module, self._choice(path, module))

    def place(self, shapes: Mapping[str, Sequence[int]], dtype: mx.Dtype) -> None:
        """Give every weight its shape, and floating ones the dtype of the activations; none takes memory."""
        from mlxcel_nb.models.stages import named_arrays

        kinds = {name: array.dtype for name, array in named_arrays(self._model)}
        zeros = [
            (name, mx.broadcast_to(mx.zeros((), dtype if mx.issubdtype(kind, mx.floating) else kind), shapes[name]))
            for name, kind in kinds.items()
        ]
        self._model.load_weights(zeros, strict=False)

    def all_reduce(self, x: mx.array) -> mx.array:
        """Stands in for the sum over the ranks, and notes it."""
        self.sums.setdefault(self._layer, []).append(x.nbytes // self._tokens)
        return x

    def run(self, otherwise: Growth) -> None:
        """Build the graph.

        Args:
            otherwise: what a layer keeps where this machine cannot build it, for want of kernels that the model has
                for another.
        """
        try:
            caches = self._run(TOKENS)
        except (RuntimeError, ValueError) as error:
            self.caches = {layer: [otherwise] for layer in range(self._n_layers)}
            self.note = f"Caches are counted by config.json, as the model does not run here: {error}."
            return
        for index, cache in enumerate(caches):
            layer = self._owners.get(index, index % self._n_layers)  # where a model runs parts of its layers itself
            growth = _growth(cache, self._heads, self._chunk)
            if growth is None:
                noted = self._owners, self.sums, self.chosen
                short, long = (_nbytes(self._run(count)[index]) for count in (LONG, 2 * LONG))
                self._owners, self.sums, self.chosen = noted
                per_token = (long - short) // LONG
                growth = Growth(per_token, max(0, short - per_token * LONG))
            if growth.per_token or growth.fixed:
                self.caches.setdefault(layer, []).append(growth)

    def _run(self, tokens: int) -> list[Any]:
        """The caches after a run over `tokens` tokens, those within others one by one."""
        from mlx_lm.models.cache import make_prompt_cache

        self._owners, self.sums, self.chosen = {}, {}, {}
        self._tokens, self._layer = tokens, 0  # what comes before the layers counts for the first
        cache = make_prompt_cache(self._model)
        self._held = list(_leaves(cache))
        self._empty = [_nbytes(each) for each in self._held]
        self._model(mx.zeros((1, tokens), mx.int32), cache=cache)
        return self._held

    def _around(self, index: int) -> Callable[..., Any]:
        def call(whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._layer = index
            out = whole(*args, **kwargs)
            for number, cache in enumerate(self._held):  # whoever fills a cache first is its owner
                if number not in self._owners and _nbytes(cache) != self._empty[number]:
                    self._owners[number] = index
            arrays = out if isinstance(out, (tuple, list)) else [out]
            self.width = sum(x.nbytes for x in arrays if isinstance(x, mx.array)) // self._tokens
            return out

        return call

    def _choice(self, path: str, module: Any) -> Callable[..., Any]:
        def call(whole: Callable[..., Any], x: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
            self.chosen[path] = min(1.0, indices.size / self._tokens / module.weight.shape[0])
            return whole(x, indices, *args, **kwargs)

        return call


def _spy(module: Any, around: Callable[..., Any]) -> None:
    """Have every call of `module` go through `around`, whose first argument is the call itself."""
    kind = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(lambda *a, **k: kind.__call__(self, *a, **k), *args, **kwargs)

    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _has_experts(module: Any) -> bool:
    from mlx_lm.models.switch_layers import SwitchLinear

    return isinstance(module, SwitchLinear)


def _leaves(caches: Any) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, (list, tuple)):
            yield from _leaves(cache)
        elif hasattr(cache, "caches"):
            yield from _leaves(cache.caches)
        elif cache is not None:
            yield cache


def _arrays(cache: Any) -> Iterator[mx.array]:
    def found(value: Any) -> Iterator[mx.array]:
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from found(item)

    for value in vars(cache).values():
        yield from found(value)


def _nbytes(cache: Any) -> int:
    return sum(array.nbytes for array in _arrays(cache))


def _growth(cache: Any, heads: int, chunk: int) -> Growth | None:
    """How a cache of a known kind grows, from what it holds after some tokens; None for one of an unknown kind."""
    from mlx_lm.models import cache as kinds

    if isinstance(cache, kinds.ArraysCache):
        return Growth(fixed=_nbytes(cache))
    if not isinstance(cache, (kinds.KVCache, kinds.RotatingKVCache, kinds.ChunkedKVCache)):
        return None
    if cache.keys is None or cache.values is None:
        return Growth()
    slots = cache.keys.shape[2]
    per_token = (cache.keys.nbytes + cache.values.nbytes) // slots
    most = None
    if isinstance(cache, kinds.RotatingKVCache):
        most = cache.max_size + chunk - 1  # it keeps a window for the first token of a chunk too
    elif isinstance(cache, kinds.ChunkedKVCache):
        most = cache.chunk_size + -(-chunk // cache.step) * cache.step
    return Growth(per_token, most=most, step=cache.step, group=max(1, heads // cache.keys.shape[1]))
