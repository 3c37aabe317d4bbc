"""Families in which late layers attend over keys and values of an earlier layer, and Gemma's inputs for each layer.

A stage whose layers read a cache that an earlier stage fills keeps a copy of it: the owner sends the keys and values it
puts in, step by step, and the stand-in of the owning layer puts them in the copy. For the MLX thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.staging.family import Call, Family, Switches


class Tapped:
    """A cache, for the time of one call of its layer, that notes what is put into it."""

    def __init__(self, cache: Any, name: str, sent: dict[str, mx.array]) -> None:
        self._cache, self._name, self._sent = cache, name, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        self._sent[f"{self._name}.keys"], self._sent[f"{self._name}.values"] = keys, values
        return self._cache.update_and_fetch(keys, values)


class SharedCaches(Family, ABC):
    """Some layers read the cache of an earlier one."""

    @abstractmethod
    def sources(self) -> dict[int, int]:
        """Layers whose caches others read, and the last layer that does."""

    def copied(self) -> list[int]:
        return self._shared(self.start)

    def owners(self, caches: int) -> list[int] | None:
        return list(range(caches))  # those that have one of their own come first

    def _shared(self, boundary: int) -> list[int]:
        """Layers before `boundary` whose caches are read after it."""
        return sorted(source for source, last in self.sources().items() if source < boundary <= last)

    def crossing(self, boundary: int) -> tuple[str, ...]:
        pairs = ((f"{source}.keys", f"{source}.values") for source in self._shared(boundary))
        return ("hidden", *(name for pair in pairs for name in pair))

    def enter(self, call: Call, switches: Switches) -> None:
        if call.index in self._shared(self.end):
            for place, cache in list(call.caches()):
                call.replace(place, Tapped(cache, str(call.index), switches.sent))

    def fill(self, call: Call, switches: Switches) -> Any:
        """Put what the owner of a cache has sent into this stage's copy; the keys and values it then holds, or None."""
        if call.index not in self._shared(self.start):
            return None
        _, cache = next(call.caches())
        return cache.update_and_fetch(*(switches.received[f"{call.index}.{what}"] for what in ("keys", "values")))

    def earlier(self, call: Call, switches: Switches) -> Any:
        self.fill(call, switches)
        return switches.received["hidden"]

    def hand_over(self, out: Any, switches: Switches) -> None:
        switches.sent["hidden"] = self.hidden(out)
        for name in self.crossing(self.end):
            if name not in switches.sent:
                switches.sent[name] = switches.received[name]


class ReuseLayers(SharedCaches):
    """AFM: a second list of layers has no keys and values of its own and reads those of the last before it."""

    def sources(self) -> dict[int, int]:
        return {len(self.inner.layers) - 1: self.n_layers - 1}

    def unchanged(self, call: Call) -> Any:
        for _, cache in call.caches():
            if cache.offset == 0:  # the look at the model: its code reads a cache, which so far has nothing
                nothing = mx.zeros((1, 1, call.first.shape[1], 1))
                cache.update_and_fetch(nothing, nothing)
        return call.first


class PerLayerInputs(SharedCaches):
    """Gemma 3n: besides shared caches, each layer has an input made of the token ids; the first stage makes them all.

    `projection` is the method that gives them, (B, L, layers, width), of which each stage hands on what is left.
    """

    projection = "project_per_layer_inputs"

    def sources(self) -> dict[int, int]:
        return {cache: layer for layer, cache in enumerate(self.inner.layer_idx_to_cache_idx) if layer != cache}

    @property
    def has_inputs(self) -> bool:
        return True

    def crossing(self, boundary: int) -> tuple[str, ...]:
        return (*super().crossing(boundary), *(("per_layer",) if self.has_inputs else ()))

    def last_position(self, out: Any) -> Any:
        return out[:, :, -1:]  # (streams, B, L, D)

    def join(self, switches: Switches) -> None:
        made_here = getattr(self.inner, self.projection)

        def projected(*args: Any, **kwargs: Any) -> mx.array:
            inputs: mx.array
            if self.start == 0:
                inputs = made_here(*args, **kwargs)
            else:
                left = switches.received["per_layer"]
                batch, length, _, width = left.shape
                inputs = mx.concatenate([mx.zeros((batch, length, self.start, width), left.dtype), left], axis=2)
            if self.end < self.n_layers:
                switches.sent["per_layer"] = inputs[:, :, self.end :]
            return inputs

        object.__setattr__(self.inner, self.projection, projected)


class CarriedCaches(PerLayerInputs):
    """Gemma 4: layers give the keys and values they attended over, and the position: (h, (keys, values), offset)."""

    projection = "_project_per_layer_inputs"

    def sources(self) -> dict[int, int]:
        return {source: layer for layer, source in enumerate(self.inner.previous_kvs) if layer != source}

    @property
    def has_inputs(self) -> bool:
        return bool(self.inner.hidden_size_per_layer_input)

    def unchanged(self, call: Call) -> Any:
        return call.first, None, None

    def earlier(self, call: Call, switches: Switches) -> Any:
        offset = next((mx.array(cache.offset) for _, cache in call.caches()), None)
        return switches.received["hidden"], self.fill(call, switches), offset

    def hidden(self, out: Any) -> mx.array:
        hidden: mx.array = out[0]
        return hidden

    def last_position(self, out: Any) -> Any:
        return out[0][:, -1:], *out[1:]
