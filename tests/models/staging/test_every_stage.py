"""Stages give the whole model's logits and tokens, on every architecture of the catalogue.

What is compared: 17 tokens at once and 8 one by one, one sequence and three, each stage loaded from the model's folder.
CI takes the families that stand for the others and a part that rotates.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.models.staging.table import FAMILIES
from mlxcel_nb.plan.part import Part
from mlxcel_nb.plan.part import whole as whole_of
from tests.catalogue import RUNNING, chosen
from tests.models.sharding.ranks import DECODE, PREFILL, ids, whole

LOOPS = ("iquestloopcoder", "nanbeige")
"""They run their layers twice over, and so a step goes twice through all stages."""

STANDING = (
    *sorted({*FAMILIES} & {*RUNNING}), "llama", "gpt2", "gemma3_text", "llama4", "deepseek_v32", "falcon_h1",
    "nemotron_h", "olmo_hybrid", "longcat_flash_ngram", "plamo", "qwen3_5",
)  # fmt: skip
"""All that need a family of their own, and of the others what is special in caches, positions, masks or structure."""

EQUAL = 1e-4


@pytest.fixture(autouse=True, scope="module")
def not_compiled() -> Iterator[None]:
    """MLX's `compile` calls a C++ compiler for each fused kernel on a CPU: minutes over all entries, for nothing."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def through(parts: list[LoadedPart], batch: int, *, all_logits: bool) -> Any:
    """Logits of every position, or of the prompt's last and all decoded ones, with counters checked on the way."""
    tokens = mx.array(ids(batch))
    caches = [part.make_cache() for part in parts]
    found = []
    for start, end in [(0, PREFILL), *((at, at + 1) for at in range(PREFILL, PREFILL + DECODE))]:
        x: Any = tokens[:, start:end]
        for lap in range(parts[0].laps):
            for part, cache in zip(parts, caches, strict=True):
                if lap or part.part.stage:
                    assert set(x) == set(part.takes)
                    assert part.size_of(x) == (batch, end - start)
                x = part.forward(x, cache, all_logits=all_logits, lap=lap)
                if lap + 1 < part.laps or not part.part.is_last:
                    assert set(x) == set(part.gives)
        found.append(x)
    return np.array(mx.concatenate(found, axis=1).astype(mx.float32))


def assert_equal(found: Any, expected: Any) -> None:
    given = np.isfinite(expected)  # a token that a model never gives has minus infinity
    assert np.array_equal(given, np.isfinite(found))
    assert np.abs(found[given] - expected[given]).max() <= EQUAL
    assert np.array_equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", chosen(STANDING))
def test_stages_are_equal_to_the_whole(name: str, tmp_path: Path) -> None:
    """Cases 5, 6, 8 and 12: even stages, a stage a layer, and uneven ones with a single layer at each end."""
    entry = ENTRIES[name]
    folder = catalogue.write(entry, tmp_path / "m")
    n = entry.n_layers
    for split in ({"pp": 2}, {"pp": 3}, {"pp": n}, {"layers": f"0,1-{n - 2},{n - 1}"}):
        layout = make_layout(n, **split)  # type: ignore[arg-type]
        parts = [load_part(folder, Part(span, n, at, layout.pp)) for at, span in enumerate(layout.stages)]
        for batch in (1, 3) if entry.batches else (1,):
            last_only = split == {"pp": 2}
            expected = whole(name, batch)
            found = through(parts, batch, all_logits=not last_only)
            assert_equal(found, expected[:, PREFILL - 1 :] if last_only else expected)
        assert [part.warnings for part in parts] == [[]] * layout.pp


@pytest.mark.parametrize("name", sorted({*LOOPS} & {*chosen(STANDING)}))
def test_layers_that_run_twice_over_on_one_stage_go_round_by_themselves(name: str, tmp_path: Path) -> None:
    folder = catalogue.write(ENTRIES[name], tmp_path / "m")
    part = load_part(folder, whole_of(ENTRIES[name].n_layers))
    assert part.laps == 1
    for last_only in (False, True):
        found = through([part], 3, all_logits=not last_only)
        assert_equal(found, whole(name, 3)[:, PREFILL - 1 :] if last_only else whole(name, 3))
