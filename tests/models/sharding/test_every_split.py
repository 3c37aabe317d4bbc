"""Tensor ranks give the whole model's logits and tokens, on every architecture of the catalogue.

What is compared: 17 tokens at once and 8 one by one, one sequence and three, each rank with its own share of the
weights, sums in rank order. CI takes the families that stand for the others and a part that rotates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlxcel_nb.models.catalogue.families import ENTRIES
from tests.catalogue import chosen
from tests.models.sharding.ranks import on_ranks, whole

STANDING = (
    "llama", "qwen3", "olmo2", "cohere", "gpt_neox", "phi3", "gemma3n", "gpt_oss", "qwen3_moe", "deepseek_v3",
    "qwen3_next", "mamba", "falcon_h1", "kimi_linear", "lfm2", "exaone",
)  # fmt: skip
"""Separate and fused products, norms over all heads, sinks, experts, latent and linear attention, state spaces."""

EQUAL = 1e-4


pytestmark = pytest.mark.usefixtures("not_compiled")


def assert_equal(found: Any, expected: Any) -> None:
    given = np.isfinite(expected)  # a token that a model never gives has minus infinity
    assert np.array_equal(given, np.isfinite(found))
    assert np.abs(found[given] - expected[given]).max() <= EQUAL
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", chosen(STANDING))
def test_ranks_are_equal_to_the_whole(name: str) -> None:
    """Case 12."""
    batches = (1, 3) if ENTRIES[name].batches else (1,)
    for tp in (2, 3, 4):
        for rank in on_ranks(name, tp, batches):
            for batch, logits in zip(batches, rank, strict=True):
                assert_equal(logits, whole(name, batch))


MIXTURES = ("mixtral", "gpt_oss", "deepseek_v3", "llama4", "nemotron_h", "kimi_k3")


@pytest.mark.parametrize("name", sorted({*MIXTURES} & set(chosen(MIXTURES))))
def test_experts_spread_over_ranks_are_equal(name: str) -> None:
    """Case 9: 8 experts as 3 + 3 + 2, some tokens with none of theirs on a rank, some with two."""
    for rank in on_ranks(name, 3, (1, 3), experts="spread"):
        for batch, logits in zip((1, 3), rank, strict=True):
            assert_equal(logits, whole(name, batch))
