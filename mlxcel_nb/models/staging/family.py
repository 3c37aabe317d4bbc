"""What crosses from layer to layer, and so from stage to stage: one class for what most models do, one for each other.

A family is told of the calls a model makes to its layers. It answers for layers of earlier stages with what those have
sent, and notes what later stages will need. It keeps no state: all that belongs to one step is in `Switches`.
For the MLX thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

Handover = dict[str, mx.array]
"""What one stage sends the next, by name. "hidden" is the output of its last layer, (B, L, D) in most models."""


class StageDone(Exception):
    """No error: it leaves a model's code after the last layer of a stage. What follows belongs to other stages."""


@dataclass
class Switches:
    """What `forward` tells the stand-ins inside a model for the time of one call, and what they tell it.

    Args:
        on_layer: called with a layer's index and the residual stream in its output, once that has been evaluated.
        all_logits: logits of every position are wanted, not of the last alone.
        only: sequences whose logits are wanted, instead of the last position's of every one.
        received: from the stage before; empty on the first.
        sent: for the next stage.
        passes: how often the layers have been run through.
        lap: which time it is that this step comes to the stage, from 0.
        family: set once, when the stage is put together.
    """

    on_layer: Callable[[int, mx.array], None] | None = None
    all_logits: bool = False
    only: mx.array | None = None
    received: Handover = field(default_factory=dict)
    sent: Handover = field(default_factory=dict)
    passes: int = 0
    lap: int = 0
    family: Family | None = None

    def begin(
        self,
        received: Handover,
        on_layer: Callable[[int, mx.array], None] | None,
        *,
        all_logits: bool,
        lap: int = 0,
        only: mx.array | None = None,
    ) -> None:
        self.received, self.sent, self.passes, self.lap = received, {}, 0, lap
        self.on_layer, self.all_logits, self.only = on_layer, all_logits, only

    def end(self) -> None:
        """Let go of everything that belongs to the step."""
        self.begin({}, None, all_logits=False)


@dataclass
class Call:
    """One call of a layer, which a family may change before the layer sees it."""

    index: int
    args: list[Any]
    kwargs: dict[str, Any]

    @property
    def first(self) -> Any:
        """The activations, in most models."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def caches(self) -> Iterator[tuple[Any, Any]]:
        """Where among the arguments key-value caches stand (a position or a name), and the caches."""
        for place, value in (*enumerate(self.args), *self.kwargs.items()):
            if hasattr(value, "update_and_fetch"):
                yield place, value

    def replace(self, place: Any, value: Any) -> None:
        if isinstance(place, int):
            self.args[place] = value
        else:
            self.kwargs[place] = value


class Family:
    """Models whose layers take one array and give one: the residual stream, (B, L, D).

    Args:
        inner: the module that owns the layers.
        layers: first layer this stage holds, and one past the last.

    Attributes:
        precise: arrays that are float32 in a model of any type.
        laps: how often a step goes through all stages.
    """

    precise: frozenset[str] = frozenset()
    laps: int = 1

    def __init__(self, inner: Any, layers: tuple[int, int], n_layers: int) -> None:
        self.inner = inner
        self.start, self.end = layers
        self.n_layers = n_layers

    def copied(self) -> list[int]:
        """Layers of earlier stages of whose caches this stage keeps a copy."""
        return []

    def owners(self, caches: int) -> list[int] | None:
        """The layer that each of a model's caches belongs to, where they are fewer than layers; None if unknown."""
        return None

    def entrance(self, layer: Any) -> Any:
        """The part of a layer that a model's code calls first: the layer itself, unless the code calls its parts."""
        return layer

    def beside(self, path: str) -> tuple[str, ...]:
        """Paths of what only the layer at `path` uses, and is not in it."""
        return ()

    def caches_of(self, lap: int, cache: list[Any]) -> list[Any]:
        """Those of the whole model's caches that a lap moves on."""
        return cache

    def leaves_after(self, index: int) -> bool:
        """Whether the model's code is left after a layer, if there are further stages."""
        return index == self.end - 1

    def crossing(self, boundary: int) -> tuple[str, ...]:
        """Names of the arrays that the layers before `boundary` send those from it on, in the order they travel."""
        return ("hidden",)

    def accept(self, received: Handover, dtype: str) -> Handover:
        """What came, in the type this stage works in; stages on unlike machines may differ in theirs."""
        kind = getattr(mx, dtype)
        return {
            name: array if name in self.precise or not mx.issubdtype(array.dtype, mx.floating) else array.astype(kind)
            for name, array in received.items()
        }

    def shape(self, received: Handover) -> tuple[int, int]:
        """Sequences and tokens of what came, (B, L)."""
        batch, length, _ = (0, 0, 0, *received["hidden"].shape)[-3:]
        return batch, length

    def unchanged(self, call: Call) -> Any:
        """What a layer gives that changes nothing, for a look at a model without its layers."""
        return call.first

    def earlier(self, call: Call, switches: Switches) -> Any:
        """The output of a layer of an earlier stage. Only that of the layer right before this stage's first counts."""
        return switches.received["hidden"]

    def enter(self, call: Call, switches: Switches) -> None:
        """A layer of this stage is about to be called; what earlier stages have sent for it is put in its place."""

    def leave(self, call: Call, out: Any, switches: Switches) -> None:
        """A layer of this stage has been called; what later stages will want of it is noted in `switches.sent`."""

    def hidden(self, out: Any) -> mx.array:
        """The residual stream in a layer's output."""
        hidden: mx.array = out
        return hidden

    def hand_over(self, out: Any, switches: Switches) -> None:
        """The last layer of the stage gave `out`: note what the next stage needs of it."""
        switches.sent["hidden"] = self.hidden(out)

    def last_position(self, out: Any) -> Any:
        """The whole model's last output, with the last position alone: the head is a prefill's dearest product."""
        return out[:, -1:]

    def sequences(self, out: Any, only: mx.array) -> Any:
        """The whole model's last output, with some of the sequences alone. Asked of families that mix."""
        return out[only]

    def join(self, switches: Switches) -> None:
        """Called once, when the stage is put together, for whatever else has to be wired."""
