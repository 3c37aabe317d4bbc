"""Prompts that are read in one layout and answered in another: every kind of cache, cut, re-cut and put together, gives
what the whole model gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.info import model_info
from mlxcel_nb.models.verifying import handing, running

TOKENS = 6
LENGTHS = (1, 11, 257)
"""The windows of the catalogue are of 8, a chunk has 256 tokens."""

ARCHITECTURES = (
    "llama", "gemma2", "gemma3_text", "deepseek_v2", "mixtral", "granitemoehybrid", "jamba", "qwen3_next", "lfm2",
    "rwkv7",
)  # fmt: skip


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
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 257, length) for length in LENGTHS]
    layers = model_info(made).layers
    whole = make_layout(layers)
    expected = [running.run(made, whole, [prompt[None]], TOKENS).records[0] for prompt in prompts]
    layouts = [make_layout(layers, **{name[:2]: int(name[2:])}) for name in (readers, answerers)]
    found = handing.run(made, layouts[0], layouts[1], [prompt[None] for prompt in prompts], TOKENS)
    for told, record in zip(found.records, expected, strict=True):
        assert told.tokens.tolist() == record.tokens.tolist()
        assert np.abs(told.logits - record.logits[:, record.predicted]).max() < 1e-4
