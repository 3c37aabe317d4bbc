"""How many experts a model has by its config, how they are spread, and what is refused before anything starts."""

from __future__ import annotations

import copy

import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.plan.experts import check_ep, experts_in, spread


def test_experts_are_spread_as_evenly_as_can_be() -> None:
    """Case 9."""
    assert spread(8, 3) == ((0, 3), (3, 6), (6, 8))
    assert spread(8, 8)[-1] == (7, 8)
    with pytest.raises(ConfigError, match=r"9 expert-parallel ranks for 8 experts\. Sizes that work: 1-8\."):
        spread(8, 9)


def test_a_dense_model_and_too_many_ranks_are_refused_by_config() -> None:
    check_ep({"model_type": "llama"}, 1)
    with pytest.raises(ConfigError, match=r"2 expert-parallel ranks for model type llama, which has no experts"):
        check_ep({"model_type": "llama"}, 2)
    with pytest.raises(ConfigError, match="no experts to spread"):
        check_ep({"model_type": "qwen3_5", "num_experts": 0}, 2)
    with pytest.raises(ConfigError, match="5 expert-parallel ranks for 4 experts"):
        check_ep({"text_config": {"num_local_experts": 4}}, 5)


def test_the_configs_of_the_catalogue_tell_their_experts() -> None:
    """Those with none are dense, whatever other words of experts they have."""
    told = {name: experts_in(copy.deepcopy(entry.config)) for name, entry in ENTRIES.items()}
    assert told["qwen3_moe"] == told["gpt_oss"] == told["gemma4"] == told["dbrx"] == told["deepseek_v3"] == 8
    assert told["llama"] == told["mamba2"] == told["gemma3n"] == 0
    assert sum(map(bool, told.values())) > 45
