"""Mixtures of the catalogue on expert-parallel ranks with data-parallel attention: equal, whoever has the sequences."""

from __future__ import annotations

import pytest

from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.verifying.catalogued import examine
from mlxcel_nb.plan.experts import experts_in
from tests.catalogue import chosen

pytestmark = pytest.mark.usefixtures("not_compiled")

STANDING = ("qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "gemma4")
"""With dense layers among the sparse, shared experts, biases, a latent space, experts beside a feed-forward."""

NOT_STACKED = ("dbrx",)
"""Each of their experts is a module of its own."""

MIXTURES = [name for name in chosen(STANDING) if experts_in(ENTRIES[name].config)]


@pytest.mark.parametrize("name", MIXTURES)
def test_ranks_with_some_experts_each_are_equal_to_the_whole_model(name: str) -> None:
    """Case 9: 8 experts on 2 ranks and on 3; 1 sequence, which leaves the other ranks without a token in every step,
    and 3 that the ranks share. Not only as near as sums allow: each product is taken as in one process.
    """
    finding = examine(name, ["ep2", "ep3"])
    assert not finding.cannot
    for verdict in finding.verdicts:
        if name in NOT_STACKED:
            assert "modules of their own" in verdict.refused
            continue
        assert verdict.equal, verdict
        assert verdict.layer is None
