"""The loader's own path: an entry of the catalogue as a folder on disk, of which each rank reads its slices alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from mlxcel_nb.models import catalogue
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.stages import named_arrays
from tests.catalogue import chosen
from tests.models.mesh import assert_equal, run_mesh

pytestmark = pytest.mark.usefixtures("not_compiled")

PROMPT = [(7 * i + 3) % 257 for i in range(17)]
PROMPTS = [PROMPT, [(5 * i + 1) % 257 for i in range(17)], [(11 * i + 90) % 257 for i in range(17)]]

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


QUANTISED = (
    ("llama", {"group_size": 32, "bits": 4, "mode": "affine"}),
    ("qwen3", {"group_size": 64, "bits": 8, "mode": "affine"}),
    ("mixtral", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ("gpt_oss", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ("deepseek_v3", {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
    ("qwen3_moe", {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
    ("phi3", {"group_size": 32, "bits": 2, "mode": "affine"}),
    ("gemma2", {"group_size": 32, "bits": 3, "mode": "affine"}),
    ("glm4", {"group_size": 32, "bits": 5, "mode": "affine"}),
    ("mamba2", {"group_size": 32, "bits": 6, "mode": "affine"}),
)
"""Ten architectures and every mode and width that MLX has."""


def quantised(name: str, folder: Path, how: dict[str, Any]) -> Path:
    """An entry's folder with every weight quantised that mlx-lm would quantise."""
    model = catalogue.build(ENTRIES[name])
    nn.quantize(
        model,
        **how,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % how["group_size"] == 0,
    )
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(named_arrays(model)), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**ENTRIES[name].config, "quantization": how}), "utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "how"), QUANTISED, ids=[f"{name}-{how['mode']}-{how['bits']}" for name, how in QUANTISED]
)
def test_a_quantised_model_keeps_bits_group_and_mode_and_is_equal(
    name: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """Case 4. The weights are the same numbers on one rank and on two, so only the order of sums differs."""
    entry = ENTRIES[name]
    folder = quantised(name, tmp_path, how)
    (reference,) = run_mesh(folder, PROMPT, n_layers=entry.n_layers, steps=8, dtype="native")
    runs = run_mesh(folder, PROMPT, n_layers=entry.n_layers, tp=2, steps=8, dtype="native")
    assert_equal(runs, reference)
    for run in runs:
        assert run.planned == run.resident
        packed = [m for _, m in run.parts[0].model.named_modules() if "scales" in m]
        assert {(m.group_size, m.bits, m.mode) for m in packed} == {(how["group_size"], how["bits"], how["mode"])}
        assert len(packed) >= 2 * entry.n_layers


def test_quantised_experts_are_spread_whole(tmp_path: Path) -> None:
    """Case 9: each file's slices are those of a rank's experts, 3 + 3 + 2."""
    folder = quantised("gpt_oss", tmp_path, {"group_size": 32, "bits": 4, "mode": "mxfp4"})
    (reference,) = run_mesh(folder, PROMPT, n_layers=7, steps=8, dtype="native")
    runs = run_mesh(folder, PROMPT, n_layers=7, tp=3, steps=8, dtype="native", experts="spread")
    assert_equal(runs, reference)
    counts = [run.parts[0].model.model.layers[2].mlp.experts.down_proj.weight.shape[0] for run in runs]
    assert counts == [3, 3, 2]
