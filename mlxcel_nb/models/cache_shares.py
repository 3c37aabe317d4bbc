"""Which part of each cache of a model a loaded part keeps. For the MLX thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.caches import every
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.plan.recutting import WHOLE, CacheShare, Holdings, kv_share


def holdings(part: LoadedPart) -> Holdings:
    """The part's share of each of the model's caches, in the order of `caches.every`.

    Raises:
        ModelError: it cannot be told which layer a cache belongs to.
    """
    made = part.make_cache()
    family = part.switches.family
    copied = [] if family is None else family.copied()
    return tuple(
        _share(part, layer, leaf) if layer is None or part.part.holds(layer) or layer in copied else None
        for layer, cache in zip(_layers(part, made), made, strict=True)
        for leaf in every([cache])
    )


def _layers(part: LoadedPart, made: Sequence[Any]) -> list[int | None]:
    """The layer of each cache; None where it makes no difference."""
    if len(made) == part.part.n_layers:
        return list(range(len(made)))
    if part.part.tp_size == part.part.n_stages == 1:
        return [None] * len(made)
    if (family := part.switches.family) is not None and (owners := family.owners(len(made))) is not None:
        return [*owners]
    keepers = sorted({*part.kv_heads, *part.states})
    if part.part.n_stages == 1 and len(keepers) == len(made):  # every layer that keeps something is cut
        return [*keepers]
    raise ModelError(
        f"its {len(made)} caches belong to some of its {part.part.n_layers} layers, and it cannot be told to which",
        advice="Give prefill and decode nodes the whole model each.",
    )


def _share(part: LoadedPart, layer: int | None, cache: Any) -> CacheShare:
    if hasattr(cache, "cache"):  # states: each of its arrays is cut in its own way
        states = part.states.get(layer, {}) if layer is not None else {}
        return tuple(states.get(number, WHOLE) for number in range(len(cache.cache)))
    heads = part.kv_heads.get(layer) if layer is not None else None
    return (WHOLE,) if heads is None else kv_share(*heads)
