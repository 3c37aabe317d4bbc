"""Prompts that are read in one layout and answered in another: every kind of cache, cut, re-cut and put together, gives
what the whole model gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from mlxcel_nb.cluster.layout import Layout, make_layout
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.models.verifying import handing, running
from tests.tiny import make_tiny

TOKENS = 6
LENGTHS = (1, 11, 257)
"""The windows of the catalogue are of 8, a chunk has 256 tokens."""

ARCHITECTURES = (
    "llama", "gemma2", "gemma3_text", "deepseek_v2", "mixtral", "granitemoehybrid", "jamba", "qwen3_next", "lfm2",
    "rwkv7",
)  # fmt: skip


def layout(layers: int, name: str) -> Layout:
    return make_layout(layers, layers=name) if "-" in name else make_layout(layers, **{name[:2]: int(name[2:])})


@pytest.fixture(scope="module", params=ARCHITECTURES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    entry = catalogue.entry(request.param)
    assert entry is not None
    folder = tmp_path_factory.mktemp("catalogue") / entry.name
    catalogue.write(entry, folder)
    return folder


@pytest.mark.parametrize(
    ("readers", "answerers"), [("tp1", "tp2"), ("tp2", "tp1"), ("tp3", "tp2"), ("pp2", "tp2"), ("tp2", "pp2")]
)
def test_every_kind_of_cache_goes_from_any_layout_to_any_other(made: Path, readers: str, answerers: str) -> None:
    compare(made, readers, answerers, LENGTHS)


def compare(made: Path, readers: str, answerers: str, lengths: Sequence[int], within: float = 1e-4) -> None:
    """Prompts of `lengths`, in layouts like "tp2", "pp2" or "0-0,1-4", are answered as the whole model answers them."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 257, length) for length in lengths]
    layers = model_info(made).layers
    whole = make_layout(layers)
    expected = [running.run(made, whole, [prompt[None]], TOKENS).records[0] for prompt in prompts]
    layouts = [layout(layers, name) for name in (readers, answerers)]
    found = handing.run(made, layouts[0], layouts[1], [prompt[None] for prompt in prompts], TOKENS)
    for told, record in zip(found.records, expected, strict=True):
        assert told.tokens.tolist() == record.tokens.tolist()
        assert np.abs(told.logits - record.logits[:, record.predicted]).max() < within


@pytest.mark.parametrize(("readers", "answerers"), [("tp1", "tp2"), ("tp2", "tp3"), ("pp2", "tp1")])
def test_quantised_caches_go_as_the_codes_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readers: str, answerers: str
) -> None:
    """Groups lie within heads, so each rank's codes are those of the whole model, but for those of numbers that lie
    between two and were added up in another order.
    """
    model = make_tiny(tmp_path / "tiny", head_dim=32, num_attention_heads=6, num_key_value_heads=3)
    make = LoadedPart.make_cache
    monkeypatch.setattr(LoadedPart, "make_cache", lambda part: [QuantizedKVCache(32, 8) for _ in make(part)])
    compare(model, readers, answerers, LENGTHS, 2e-2)
