"""Facts about a made-up model, for tests of the planner: layers of equal size, with ends that can be dear."""

from __future__ import annotations

from typing import Any

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.facts import Ends, Growth, LayerFacts, ModelFacts, RankFacts

GB = 10**9


def model(
    n_layers: int = 48,
    *,
    layer: int = GB,
    kv: int = 4096,
    head: int = 0,
    sizes: tuple[int, ...] = (1, 2, 3, 4),
    growth: Growth | None = None,
    **changes: Any,
) -> ModelFacts:
    """A model whose ranks share every layer evenly."""

    def rank(tp: int, number: int) -> RankFacts:
        cache = growth or Growth(kv // tp, step=1)
        one = LayerFacts(layer // tp, layer // tp, layer // tp // 2, 0, (cache,), (8192, 8192) if tp > 1 else ())
        own = head if number == 0 else 0
        return RankFacts((one,) * n_layers, Ends(2 * own, own, 0, own), own)

    whole = ModelFacts(
        name="made up", model_type="llama", context=131072, dtype="bfloat16", itemsize=2, width=8192, vocab=1000,
        heads=0, chunk=256, ranks={tp: tuple(rank(tp, r) for r in range(tp)) for tp in sizes}, refused={},
    )  # fmt: skip
    return ModelFacts(**{**vars(whole), **changes})


def refusal(tp: int) -> ConfigError:
    return ConfigError(f"tensor parallel size {tp} does not work", advice="Sizes that work: 1, 2.")
