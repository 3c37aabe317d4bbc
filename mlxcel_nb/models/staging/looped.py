"""Families that run their layers several times over: a step goes through all stages once for each time, a lap.

One lap of a stage is mlx-lm's own code over a view of the module that owns the layers: the stage's layers alone, and
their caches of that lap. What the last stage gives goes back to the first. For the MLX thread.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.staging.family import Family, StageDone, Switches
from mlxcel_nb.models.staging.skeleton import mixed


class Looped(Family, ABC):
    """Models with a cache for each layer and lap, those of one lap after those of the one before."""

    def __init__(self, inner: Any, layers: tuple[int, int], n_layers: int) -> None:
        super().__init__(inner, layers, n_layers)
        self.laps = self.count()
        self._kind: Any = type(inner)

    @abstractmethod
    def count(self) -> int:
        """How often a step runs the layers."""

    @abstractmethod
    def view(self, lap: int, caches: list[list[Any]]) -> tuple[Any, list[Any]]:
        """A copy of the owner of the layers that runs this stage's ones once, and the caches it is given.

        Args:
            caches: of this stage's layers, by lap.
        """

    def copy(self) -> Any:
        """The owner of the layers with the same parts, of which some may be replaced. No step leaves a trace in it."""
        made = self._kind.__new__(self._kind)
        vars(made).update(vars(self.inner))
        dict.update(made, self.inner)
        return made

    @property
    def whole(self) -> bool:
        """All layers are here, and mlx-lm's code goes round by itself."""
        return self.end - self.start == self.n_layers

    def caches_of(self, lap: int, cache: list[Any]) -> list[Any]:
        return cache if self.whole else cache[lap * self.n_layers : (lap + 1) * self.n_layers]

    def leaves_after(self, index: int) -> bool:
        return self.whole and super().leaves_after(index)

    def join(self, switches: Switches) -> None:
        if not self.whole:
            self.inner.__class__ = mixed(Lap, type(self.inner))
            object.__setattr__(self.inner, "_lap", (self, switches))

    def run(self, inputs: mx.array, cache: list[Any], switches: Switches) -> mx.array:
        """One lap of the owner's own code; what the last stage's last lap gives goes on to the head."""
        lap, last = switches.lap, self.end == self.n_layers
        own = [self.caches_of(each, cache)[self.start : self.end] for each in range(self.laps)]
        view, caches = self.view(lap, own)
        if lap or self.start:
            view.embed_tokens = lambda _: switches.received["hidden"]
        if not last:
            view.norm = unchanged
        out: mx.array = view(inputs, caches)
        switches.sent["hidden"] = out
        if not last or lap + 1 < self.laps:
            raise StageDone
        return out if switches.all_logits else out[:, -1:]


class Lap:
    """Mixed into the class of the module that owns the layers."""

    def __call__(self, inputs: mx.array, cache: list[Any]) -> Any:
        family, switches = object.__getattribute__(self, "_lap")
        return family.run(inputs, cache, switches)


class Loops(Looped):
    """Nanbeige: every lap is the same, but for a norm at its end that some have after the last one alone."""

    def count(self) -> int:
        return int(self.inner.num_loops)

    def view(self, lap: int, caches: list[list[Any]]) -> tuple[Any, list[Any]]:
        view = self.copy()
        view.layers, view.num_loops = self.inner.layers[self.start : self.end], 1
        if self.inner.skip_loop_final_norm and lap + 1 < self.laps:
            view.norm = unchanged
        return view, caches[lap]


class TwoLoops(Looped):
    """IQuest's coder: the second lap attends over the first one's keys and values too, mixed by gates of its own.

    Its code calls the parts of a layer one by one, the norm before its attention first.
    """

    def count(self) -> int:
        return 2

    def entrance(self, layer: Any) -> Any:
        return layer.input_layernorm

    def beside(self, path: str) -> tuple[str, ...]:
        owner, _, index = path.rpartition("layers.")
        return (f"{owner}gate_projections.{index}",)

    def view(self, lap: int, caches: list[list[Any]]) -> tuple[Any, list[Any]]:
        view = self.copy()
        layers, gates = (each[self.start : self.end] for each in (self.inner.layers, self.inner.gate_projections))
        first, second = caches
        if not lap:
            view.layers, view.gate_projections, view.norm = layers, [], unchanged  # no gate, no second lap
            return view, first + second
        view.layers, view.gate_projections = Recalling(layers), gates
        return view, [*map(PastCache, first), *second]


class Recalling(list[Any]):
    """Layers whose first lap is over: who goes through them a first time meets what that has left, then themselves."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers)
        self._past = True

    def __iter__(self) -> Iterator[Any]:
        past, self._past = self._past, False
        return iter([Past()] * len(self)) if past else super().__iter__()


class Past:
    """A layer that adds nothing to what goes through it."""

    @property
    def self_attn(self) -> Past:
        return self

    def input_layernorm(self, x: mx.array) -> mx.array:
        return x

    def post_attention_layernorm(self, x: mx.array) -> mx.array:
        return x

    def get_qkv(self, x: mx.array, offset: int) -> tuple[mx.array, None, None]:
        return x, None, None

    def attention(self, x: mx.array, keys: Any, values: Any, mask: Any, cache: Any) -> mx.array:
        return x[:, None]

    def o_proj(self, x: mx.array) -> float:
        return 0.0

    def mlp(self, x: mx.array) -> float:
        return 0.0


class PastCache:
    """A cache of the first lap in the second: it is read, and nothing is put in."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        return self._cache.keys_and_values()

    def make_mask(self, length: int, **how: Any) -> Any:
        """The first lap's, which was made before the tokens of this step were in the cache."""
        before = copy.copy(self._cache)
        before.trim(length)
        return before.make_mask(length, **how)


def unchanged(x: mx.array) -> mx.array:
    """In the place of a norm that belongs to a later stage or lap."""
    return x
