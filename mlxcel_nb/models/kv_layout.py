"""Which keys and values a loaded part keeps, of the whole model's. For the MLX thread."""

from __future__ import annotations

from mlxcel_nb.errors import RequestError
from mlxcel_nb.models.batching_rows import PLAIN, kind_of
from mlxcel_nb.models.caches import every
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.plan.kv_shares import ALL, Shares


def shares(part: LoadedPart) -> Shares:
    """The part's share of each of the model's caches.

    Raises:
        RequestError: a model whose caches cannot be taken apart token by token, and why.
    """
    caches = list(every(made := part.make_cache()))
    odd = next((type(cache).__name__ for cache in caches if kind_of(cache) is not PLAIN), None)
    if odd is not None:
        raise RequestError(
            f"what this model keeps cannot be saved or loaded: a {odd} has no place of its own for every token"
        )
    if len(caches) != len(made) or len(caches) != part.part.n_layers:
        raise RequestError("what this model keeps cannot be saved or loaded: its layers do not keep a cache each")
    return tuple(part.kv_heads.get(layer, ALL) if part.part.holds(layer) else None for layer in range(len(caches)))
