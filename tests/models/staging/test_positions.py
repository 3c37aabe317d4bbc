"""Rotary positions of every scaling are those of the whole model in a stage that starts mid-model, and on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.plan.part import whole
from tests.models.mesh import assert_equal, run_mesh
from tests.tiny import make_tiny

ORIGINAL = 16

SCALINGS: dict[str, dict[str, Any] | None] = {
    "null": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL,
                 "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0]},
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_positions_are_those_of_the_whole_model_below_and_above_the_original_length(name: str, tmp_path: Path) -> None:
    """Case 7."""
    folder = make_tiny(tmp_path / "m", rope_scaling=SCALINGS[name], max_position_embeddings=ORIGINAL * 4)
    for length in (10, 15, 40):  # below all along, across while decoding, above
        prompt = [(i * 7 + 3) % 256 for i in range(length)]
        (reference,) = run_mesh(folder, prompt, steps=4)
        assert np.isfinite(reference.prompt_logits).all()
        for split in ({"layers": "0-2,3-4"}, {"tp": 2}):
            assert_equal(run_mesh(folder, prompt, steps=4, **split), reference)  # type: ignore[arg-type]


def test_scalings_differ_from_each_other(tmp_path: Path) -> None:
    """Else the test above would compare nothing."""
    prompt = [(i * 7 + 3) % 256 for i in range(40)]
    found = []
    for name, scaling in SCALINGS.items():
        folder = make_tiny(tmp_path / name, rope_scaling=scaling, max_position_embeddings=ORIGINAL * 2)
        found.append(run_mesh(folder, prompt)[0].prompt_logits)
    for index, one in enumerate(found):
        assert all(np.abs(one - other).max() > 1e-3 for other in found[:index])


def test_a_scaling_that_mlx_lm_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m", rope_scaling={"rope_type": "helical", "factor": 2.0})
    with pytest.raises(ModelError, match="helical"):
        load_part(folder, whole(5))
