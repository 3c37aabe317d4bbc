"""Rows of the embedding and of the head on each rank: what is read of the files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.plan.part import Part
from tests.models.mesh import assert_equal, run_mesh
from tests.models.sharding.quantised import quantised
from tests.tiny import make_tiny

pytestmark = pytest.mark.usefixtures("not_compiled")

PROMPT = [(7 * i + 3) % 257 for i in range(17)]


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_has_its_rows_of_the_vocabulary_alone(tied: bool, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, tie_word_embeddings=tied)
    whole = run_mesh(folder, PROMPT, tp=3)
    shared = run_mesh(folder, PROMPT, tp=3, vocab_parallel=True)
    assert_equal(shared, whole[0])
    rows = [86, 86, 85]
    for rank, (one, other) in enumerate(zip(whole, shared, strict=True)):
        head = 1 if not tied and rank == 0 else 0
        tables = 1 if tied else 2
        norm = 64 if rank else 0  # every rank runs the model to its end
        assert other.resident[0] - one.resident[0] == 4 * (64 * (tables * rows[rank] - (1 + head) * 257) + norm)
        assert other.planned == other.resident


def test_stages_have_the_rows_they_use(tmp_path: Path) -> None:
    """The first stage looks tokens up, the last one makes logits; both do with the same rows where they are tied."""
    runs = run_mesh(make_tiny(tmp_path), PROMPT, tp=2, pp=3, vocab_parallel=True)
    for run, rows in zip(runs, (129, 128), strict=True):
        tables = [part.model.model.embed_tokens for part in run.parts]
        held = [[array.shape[0] for array in table.parameters().values()] for table in tables]
        assert held == [[rows], [], [rows]]


QUANTISED = (
    ("llama", {"group_size": 32, "bits": 4, "mode": "affine"}),
    ("gemma2", {"group_size": 32, "bits": 8, "mode": "affine"}),
    ("qwen3", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
)
"""An untied head, a tied one with soft caps, and scales without biases."""


@pytest.mark.parametrize(("name", "how"), QUANTISED, ids=[name for name, _ in QUANTISED])
def test_quantised_rows_keep_their_groups(name: str, how: dict[str, object], tmp_path: Path) -> None:
    """Case 4."""
    n = ENTRIES[name].n_layers
    folder = quantised(ENTRIES[name], tmp_path, how)
    (reference,) = run_mesh(folder, PROMPT, n_layers=n, steps=8, dtype="native")
    for tp in (2, 3):
        runs = run_mesh(folder, PROMPT, n_layers=n, tp=tp, steps=8, dtype="native", vocab_parallel=True)
        assert_equal(runs, reference)
        for run in runs:
            assert run.planned == run.resident
            table = run.parts[0].model.model.embed_tokens
            assert (table.group_size, table.bits, table.mode) == (how["group_size"], how["bits"], how["mode"])
            assert table.weight.shape[0] in (129, 128, 86, 85)


def test_ranks_that_cannot_put_logits_together_are_refused(tmp_path: Path) -> None:
    part = Part((0, 5), 5, 0, 1, 0, 2, vocab_parallel=True)
    with pytest.raises(ConfigError, match="need a gather"):
        load_part(make_tiny(tmp_path), part, all_reduce=lambda x: x)


def test_an_architecture_that_the_catalogue_has_not_proved_keeps_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny(tmp_path)
    expected = run_mesh(folder, PROMPT, tp=2, steps=4)
    monkeypatch.setattr(catalogue, "entry", lambda _name: None)
    found = run_mesh(folder, PROMPT, tp=2, steps=4, vocab_parallel=True)
    assert_equal(found, expected[0])
    for run, other in zip(found, expected, strict=True):
        assert run.resident == other.resident
        assert any(each.startswith("vocabulary is computed whole") for each in run.warnings)


def test_a_rank_that_has_all_shares_with_nobody(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    (alone,) = run_mesh(folder, PROMPT, steps=4, vocab_parallel=True)
    assert_equal([alone], run_mesh(folder, PROMPT, steps=4)[0])
    assert alone.parts[0].model.model.embed_tokens.weight.shape == (257, 64)
