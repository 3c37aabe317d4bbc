"""Every entry of the catalogue runs whole, and mlx-lm gives the same logits token by token as in one go."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.models import architecture, catalogue
from mlxcel_nb.models.catalogue.families import ENTRIES, FAMILIES

PREFILL, DECODE = 17, 8
RUNNING = [name for name, entry in ENTRIES.items() if not entry.fails]


def ids(batch: int, vocabulary: int = 257) -> mx.array:
    return mx.array(np.random.default_rng(1).integers(0, vocabulary, (batch, PREFILL + DECODE)).astype(np.int32))


def fresh_cache(model: Any) -> Any:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def stepwise(model: Any, tokens: mx.array) -> mx.array:
    """Logits of all positions: the prompt at once, then a token at a time."""
    cache = fresh_cache(model)
    parts = [model(tokens[:, :PREFILL], cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(PREFILL, PREFILL + DECODE)]
    return mx.concatenate(parts, axis=1)


@pytest.mark.parametrize("name", RUNNING)
def test_the_whole_model_decodes_as_it_reads(name: str) -> None:
    """Cached decoding equals one forward over all tokens, so the configuration is one that mlx-lm gets right."""
    entry = ENTRIES[name]
    model = catalogue.build(entry)
    assert len(model.layers) == entry.n_layers
    for batch in (1, 3) if entry.batches else (1,):
        tokens = ids(batch)
        whole = model(tokens, cache=fresh_cache(model)) if entry.needs_cache else model(tokens)
        steps = stepwise(model, tokens)
        assert steps.shape == (batch, PREFILL + DECODE, 257)
        assert mx.abs(steps - whole).max().item() < 1e-4
        assert 0.3 < steps.std(axis=-1).min().item() < steps.std(axis=-1).max().item() < 10


def test_a_family_names_each_of_its_entries_once() -> None:
    names = [entry.name for family in FAMILIES for entry in family.ENTRIES]
    assert len(names) == len(set(names))
    assert set(names) <= set(catalogue.architectures())
    for entry in ENTRIES.values():
        assert architecture.module_name(entry.config) == entry.name
        assert entry.features


def test_what_is_no_decoder_is_no_architecture() -> None:
    assert not {"base", "cache", "mla", "ssm", "rope_utils", "switch_layers"} & set(catalogue.architectures())
    assert {"llama", "glm_moe_dsa", "lfm2-vl", "olmo"} <= set(catalogue.architectures())
