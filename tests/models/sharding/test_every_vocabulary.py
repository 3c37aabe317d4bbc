"""Ranks that share the vocabulary too give the whole model's logits and tokens, on every architecture.

What is compared: 17 tokens at once and 8 one by one, three sequences where the model takes them. The catalogue's
vocabulary of 257 divides by no number of ranks. CI takes those that stand for the others and a part that rotates.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlxcel_nb.models import catalogue
from mlxcel_nb.models.catalogue import Entry
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.sharding.vocabulary import READS_TABLE
from tests.catalogue import chosen
from tests.models.mesh import Run, assert_equal, run_mesh

pytestmark = pytest.mark.usefixtures("not_compiled")

PROMPTS = [[(step * i + start) % 257 for i in range(17)] for step, start in ((7, 3), (5, 1), (11, 90))]

STANDING = ("llama", "phi", "gemma2", "gemma3n", "cohere", "gpt_neox", "nanbeige")
"""An untied head, one with a bias, a tied one with soft caps, tables for each layer, scaled logits, layers that run
twice."""


def check(entry: Entry, folder: Path, *layouts: tuple[int, int]) -> list[Run]:
    """Compare each layout, of ranks and stages; the last one's ranks."""
    catalogue.write(entry, folder)
    prompt = PROMPTS if entry.batches else PROMPTS[0]
    (reference,) = run_mesh(folder, prompt, n_layers=entry.n_layers, steps=8)
    for tp, pp in layouts:
        runs = run_mesh(folder, prompt, n_layers=entry.n_layers, tp=tp, pp=pp, steps=8, vocab_parallel=True)
        assert_equal(runs, reference)
        for run in runs:
            assert run.planned == run.resident
    return runs


def kept_whole(run: Run) -> bool:
    return any(warning.startswith("vocabulary is computed whole") for warning in run.warnings)


@pytest.mark.parametrize("name", chosen(STANDING))
def test_ranks_that_share_the_vocabulary_are_equal(name: str, tmp_path: Path) -> None:
    """Case 12: on 2 ranks, on 3, and on 2 ranks in each of 2 stages."""
    entry = ENTRIES[name]
    runs = check(entry, tmp_path, *(((2, 1), (3, 1), (2, 2)) if name in STANDING else ((3, 1),)))
    reads = name in READS_TABLE and entry.config["tie_word_embeddings"]
    assert [kept_whole(run) for run in runs] == [reads] * len(runs)


@pytest.mark.parametrize("name", sorted(READS_TABLE))
def test_an_embedding_that_is_read_otherwise_stays_whole(name: str, tmp_path: Path) -> None:
    entry = ENTRIES[name]
    tied = {**entry.config, "tie_word_embeddings": True}
    runs = check(replace(entry, config=tied, absent=("lm_head.weight",)), tmp_path, (2, 1))
    assert all(map(kept_whole, runs))
