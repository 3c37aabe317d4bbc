"""What the plan says of ranks that share the vocabulary is what they take once they are loaded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models import architecture, catalogue, sizes
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.models.sharding.vocabulary import READS_TABLE
from mlxcel_nb.plan.facts import ModelFacts
from mlxcel_nb.plan.part import part_of
from tests.published import PUBLISHED
from tests.tiny import make_tiny, quantise_tiny

WHOLE = "vocabulary is computed whole on every tensor rank: "
PROVED = [name for name in catalogue.architectures() if (one := catalogue.entry(name)) and not one.fails]
KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "tied and quantised": {},
    "untied and quantised": {"tie_word_embeddings": False},
}


def look(folder: Path, *, files: bool, dtype: str = "native", ranks: int = 3) -> ModelFacts:
    config = {**architecture.read_config(folder), "torch_dtype": "float32"}
    entries = weight_files(folder) if files else None
    return sizes.gather(config, name="m", folder=folder, entries=entries, dtype=dtype, ranks=ranks, vocab_parallel=True)


def check(folder: Path, found: list[ModelFacts], tp: int, pp: int, dtype: str = "native") -> None:
    """Every part of a layout, as planned from files and from the config alone, against the part as it is loaded."""
    layout = make_layout(found[0].n_layers, tp=tp, pp=pp)
    for member in range(layout.size):
        part = part_of(layout, layout.stage_of(member), layout.rank_of(member), vocab_parallel=True)
        loaded = load_part(folder, part, dtype=dtype, all_reduce=lambda x: x, gather=lambda x, _widths: x)
        for facts in found:
            planned = facts.ranks[tp][part.tp_rank].weights(part.layers, part.stage, pp)
            assert planned == loaded.resident_bytes == loaded.planned_bytes, (tp, pp, member)


@pytest.mark.parametrize("dtype", ["native", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_part_takes_what_loading_it_takes(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", torch_dtype="float32", **KINDS[kind])
    if "quantised" in kind:
        folder = quantise_tiny(tmp_path / "q", folder, group_size=32, bits=4, mode="affine")
    found = [look(folder, files=files, dtype=dtype) for files in (True, False)]
    for tp, pp in ((1, 2), (2, 1), (3, 1), (2, 3)):
        check(folder, found, tp, pp, dtype)


@pytest.mark.parametrize("name", ["gemma3n", "nanbeige", *PROVED[2::16]])
def test_parts_of_every_architecture_take_what_loading_them_takes(name: str, tmp_path: Path) -> None:
    """Tables for each layer and layers that run twice over among them."""
    one = catalogue.entry(name)
    assert one is not None
    folder = catalogue.write(one, tmp_path)
    found = [look(folder, files=files, ranks=2) for files in (True, False)]
    check(folder, found, 2, 1)
    if not found[0].unstaged:
        check(folder, found, 2, 2)


@pytest.mark.parametrize("name", sorted(READS_TABLE))
def test_a_vocabulary_that_stays_whole_is_counted_whole_and_named(name: str, tmp_path: Path) -> None:
    one = catalogue.entry(name)
    assert one is not None
    config = {**copy.deepcopy(one.config), "tie_word_embeddings": True}
    shared, plain = (sizes.gather(config, name=name, ranks=2, vocab_parallel=asked) for asked in (True, False))
    assert (shared.vocab_parallel, shared.ranks) == (False, plain.ranks)
    (note,) = [note for note in shared.notes if note.startswith(WHOLE)]
    assert "multiplies with the embedding itself" in note


def test_an_architecture_that_the_catalogue_has_not_proved_keeps_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny(tmp_path)
    monkeypatch.setattr(catalogue, "entry", lambda _name: None)
    facts = look(folder, files=True, ranks=2)
    assert not facts.vocab_parallel
    assert any(note.startswith(WHOLE) for note in facts.notes)
    check(folder, [facts], 2, 1)


def test_a_large_vocabulary_is_worth_it_and_costs_one_more_sum() -> None:
    """Llama 3.1 8B: 128256 rows of 4096 in bfloat16, once in the embedding and once in the head."""
    config = PUBLISHED["8B dense"].config
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    plain, shared = (
        sizes.gather(copy.deepcopy(config), name="8B", ranks=4, vocab_parallel=asked) for asked in (False, True)
    )
    table, n = 128256 * 4096 * 2, plain.n_layers
    for rank in range(4):
        before, after = (facts.ranks[4][rank].weights((0, n), 0, 1) for facts in (plain, shared))
        whole = 2 * table if rank == 0 else table  # the head is on rank 0 alone
        norm = 0 if rank == 0 else 4096 * 2
        assert after == before - whole + 2 * table // 4 + norm
        assert shared.ranks[4][rank].head == pytest.approx(table // 4, rel=0.001)
    assert shared.ranks[1] == plain.ranks[1]
    one, other = (facts.ranks[4][0].layers for facts in (plain, shared))
    assert other[0].sums == (4096 * 2, *one[0].sums)
    assert other[1:] == one[1:]
    assert mx.get_peak_memory() - active < 1 << 20, "something was computed"
