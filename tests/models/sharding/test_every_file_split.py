"""The loader's own path: an entry of the catalogue as a folder on disk, of which each rank reads its slices alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcel_nb.models import catalogue
from mlxcel_nb.models.catalogue.families import ENTRIES
from tests.catalogue import chosen
from tests.models.mesh import assert_equal, run_mesh
from tests.models.sharding.quantised import PROMPT, PROMPTS, kinds, quantised

pytestmark = pytest.mark.usefixtures("not_compiled")

STANDING = ("phi3", "gpt_neox", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba2", "exaone", "nanbeige")


@pytest.mark.parametrize("name", chosen(STANDING))
def test_each_rank_reads_its_slices_and_they_are_equal(name: str, tmp_path: Path) -> None:
    """Case 12: on 3 ranks, and on 2 ranks in each of 2 stages, one sequence and three."""
    entry = ENTRIES[name]
    folder = catalogue.write(entry, tmp_path)
    for prompt in (PROMPT, PROMPTS) if entry.batches else (PROMPT,):
        (reference,) = run_mesh(folder, prompt, n_layers=entry.n_layers, steps=8)
        for tp, pp in ((3, 1), (2, 2)):
            runs = run_mesh(folder, prompt, n_layers=entry.n_layers, tp=tp, pp=pp, steps=8)
            assert_equal(runs, reference)
            for run in runs:
                assert run.planned == run.resident


WIDTHS = (("phi3", 2), ("gemma2", 3), ("glm4", 5), ("mamba2", 6))
"""The widths of mode affine that test_every_quantised_split.py leaves out."""


@pytest.mark.parametrize(("name", "bits"), WIDTHS)
def test_other_widths_are_kept_and_are_equal(name: str, bits: int, tmp_path: Path) -> None:
    """Case 4. The weights are the same numbers on one rank and on two, so only the order of sums differs."""
    entry = ENTRIES[name]
    folder = quantised(entry, tmp_path, {"group_size": 32, "bits": bits, "mode": "affine"})
    (reference,) = run_mesh(folder, PROMPT, n_layers=entry.n_layers, steps=8, dtype="native")
    runs = run_mesh(folder, PROMPT, n_layers=entry.n_layers, tp=2, steps=8, dtype="native")
    assert_equal(runs, reference)
    for run in runs:
        assert run.planned == run.resident
        assert kinds(run.parts[0].model) == {(32, bits, "affine")}


def test_quantised_experts_are_spread_whole(tmp_path: Path) -> None:
    """Case 9: each file's slices are those of a rank's experts, 3 + 3 + 2."""
    folder = quantised(ENTRIES["gpt_oss"], tmp_path, {"group_size": 32, "bits": 4, "mode": "mxfp4"})
    (reference,) = run_mesh(folder, PROMPT, n_layers=7, steps=8, dtype="native")
    runs = run_mesh(folder, PROMPT, n_layers=7, tp=3, steps=8, dtype="native", experts="spread")
    assert_equal(runs, reference)
    counts = [run.parts[0].model.model.layers[2].mlp.experts.down_proj.weight.shape[0] for run in runs]
    assert counts == [3, 3, 2]
