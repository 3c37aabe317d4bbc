"""How a mixture's experts are spread over expert-parallel ranks, and which sizes work. Pure; any thread.

Each rank has some experts whole and all the rest of the model. A sequence is at home on one rank; a token that chooses
experts of other ranks goes to them, and what they make of it comes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.shards import Range, split_evenly

KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""What config.json calls the number of experts, in all decoders of mlx-lm that have some."""

TABLES = ("text_config", "ffn_config")
"""Where else it may stand."""


def spread(experts: int, ep: int) -> tuple[Range, ...]:
    """Each rank's experts: as many as can be, the first ranks one more: 8 over 3 is 3 + 3 + 2.

    Raises:
        ConfigError: fewer experts than ranks.
    """
    if ep > experts:
        raise ConfigError(
            f"{ep} expert-parallel ranks for {experts} experts", advice=f"Sizes that work: 1-{max(1, experts)}."
        )
    return split_evenly(experts, ep)


def experts_in(config: Mapping[str, Any]) -> int:
    """Experts of a mixture by config.json, 0 where it names none."""
    found = (table.get(key) for table in _tables(config) for key in KEYS)
    return max((each for each in found if isinstance(each, int) and not isinstance(each, bool)), default=0)


def _tables(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for name in TABLES:
        if isinstance(inner := config.get(name), Mapping):
            yield from _tables(inner)


def check_ep(config: Mapping[str, Any], ep: int) -> None:
    """Refuse what has no experts to spread, or too few, before an engine starts or a weight is read.

    Raises:
        ConfigError: naming ranks and experts.
    """
    if ep == 1:
        return
    if experts_in(config) < 2:
        raise dense(str(config.get("model_type")), ep)
    spread(experts_in(config), ep)


def dense(model_type: str, ep: int) -> ConfigError:
    """Why a model without experts is refused."""
    what = f"{ep} expert-parallel ranks for model type {model_type}, which has no experts to spread"
    return ConfigError(what, advice="Split it by --tp or --pp.")
