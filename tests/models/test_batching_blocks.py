"""A sequence that begins with blocks of another goes on as one that has read the tokens itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.batching import Group
from mlxcel_nb.models.batching_blocks import cut, from_blocks, packed, reusable
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.plan.part import Part
from tests.models.batches import through

pytestmark = pytest.mark.usefixtures("not_compiled")

IDS = np.arange(40, dtype=np.int32) * 11 % 257


def stages(name: str, folder: Path, pp: int = 1) -> list[LoadedPart]:
    n = ENTRIES[name].n_layers
    catalogue.write(ENTRIES[name], folder)
    return [load_part(folder, Part(span, n, at, pp)) for at, span in enumerate(make_layout(n, pp=pp).stages)]


def read(parts: list[LoadedPart], caches: list[list[Any]], begin: int, end: int) -> Any:
    return np.array(through(parts, caches, IDS[begin:end]))


def cold(parts: list[LoadedPart]) -> Any:
    """Logits after 30 tokens, and after 3 more."""
    caches = [part.make_cache() for part in parts]
    read(parts, caches, 0, 16)
    return [read(parts, caches, 16, 30), *(read(parts, caches, at, at + 1) for at in range(30, 33))]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v32", "gpt2", "nanbeige"])
@pytest.mark.parametrize("pp", [1, 2])
def test_blocks_are_equal_to_a_cold_run(name: str, pp: int, tmp_path: Path) -> None:
    parts = stages(name, tmp_path, pp)
    sources = [part.make_cache() for part in parts]
    read(parts, sources, 0, 25)
    assert all(map(reusable, sources))
    blocks = [[cut(source, at, at + 8) for at in (0, 8)] for source in sources]
    caches = [from_blocks(each, part) for each, part in zip(blocks, parts, strict=True)]
    wanted = cold(parts)
    found = [read(parts, caches, 16, 30), *(read(parts, caches, at, at + 1) for at in range(30, 33))]
    assert max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) <= 1e-4


@pytest.mark.parametrize("pp", [1, 2])
def test_blocks_of_a_row_of_a_group_too(pp: int, tmp_path: Path) -> None:
    """Whoever shares the step, and however much padding is before the row."""
    parts = stages("qwen3", tmp_path, pp)
    groups, longer, row = [Group(part) for part in parts], [], []
    for part in parts:
        longer.append(part.make_cache())
        row.append(part.make_cache())
    read(parts, longer, 0, 35)
    read(parts, row, 0, 14)
    for group, *caches in zip(groups, longer, row, strict=True):
        group.join(list(enumerate(caches)))
    for at in (14, 15, 16):
        x: Any = mx.array([[5], [int(IDS[at])]])
        for group in groups:
            x = group.forward(x)
        mx.eval(x)
    blocks = [[group.cut(1, 0, 8), group.cut(1, 8, 16)] for group in groups]
    for group in groups:
        group.leave([0, 1])
    caches = [from_blocks(each, part) for each, part in zip(blocks, parts, strict=True)]
    found = [read(parts, caches, 16, 30), *(read(parts, caches, at, at + 1) for at in range(30, 33))]
    assert max(np.abs(a - b).max() for a, b in zip(found, cold(parts), strict=True)) <= 1e-4


def test_blocks_are_copies_and_nothing_else_stays(tmp_path: Path) -> None:
    (part,) = stages("qwen3", tmp_path)
    limit = mx.set_cache_limit(0)  # buffers that are kept to be used again are larger, and counted as they are
    read([part], [part.make_cache()], 0, 3)
    before = mx.get_active_memory()
    caches = part.make_cache()
    read([part], [caches], 0, 30)
    block = cut(caches, 4, 12)
    del caches
    assert mx.get_active_memory() - before == block.nbytes
    assert block.tokens == 8 and len(block.packs) == 1, "all of one shape are one array"
    restored = from_blocks([block, block], part)
    assert mx.get_active_memory() - before == 3 * block.nbytes
    del restored, block
    assert mx.get_active_memory() == before
    mx.set_cache_limit(limit)


def test_windows_and_states_have_no_blocks(tmp_path: Path) -> None:
    for name in ("gemma3_text", "mamba2", "falcon_h1", "llama4"):
        (part,) = stages(name, tmp_path / name)
        assert not reusable(part.make_cache())


def test_a_stage_without_layers_of_a_kind_counts_the_tokens(tmp_path: Path) -> None:
    first, second = stages("qwen3", tmp_path, pp=2)
    del first
    layers = len(second.make_cache())
    caches = from_blocks([packed(8, [None] * layers)] * 2, second)
    assert {cache.offset for cache in caches} == {16}
