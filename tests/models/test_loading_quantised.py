"""Quantised models: cut at whole groups with bits, group size and mode kept, or turned into plain numbers on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.part import Part
from tests.models.mesh import assert_equal, run_mesh
from tests.models.test_loading_split import PROMPT, from_mlx_lm
from tests.tiny import make_tiny, quantise_tiny

OVERRIDES: dict[str, Any] = {
    "model.layers.1.self_attn.q_proj": {"group_size": 64, "bits": 8},
    "model.layers.2.mlp.down_proj": {"group_size": 32, "bits": 8, "mode": "affine"},
    "model.layers.3.self_attn.k_proj": False,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("plain") / "m", num_key_value_heads=2)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, plain: Path) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "m"
    return quantise_tiny(folder, plain, group_size=32, bits=4, mode="affine", overrides=OVERRIDES)


def modules_of(part: Any) -> dict[str, nn.Module]:
    """By the names of the weights: without the stand-ins."""
    found = {path.replace(".layer.", ".").removesuffix(".linear"): m for path, m in part.model.named_modules()}
    return {path: module for path, module in found.items() if isinstance(module, nn.Module)}


def test_on_a_cpu_it_becomes_float32_and_gives_mlx_lm_s_logits(packed: Path) -> None:
    (run,) = run_mesh(packed, PROMPT, steps=16)
    assert_equal([run], from_mlx_lm(packed, PROMPT, 16))
    modules = modules_of(run.parts[0])
    assert not any(isinstance(m, nn.QuantizedLinear | nn.QuantizedEmbedding) for m in modules.values())
    assert run.parts[0].dtype == "float32"


def test_native_keeps_it_quantised_and_is_mlx_lm_s_own(packed: Path) -> None:
    (run,) = run_mesh(packed, PROMPT, steps=16, dtype="native")
    assert_equal([run], from_mlx_lm(packed, PROMPT, 16))
    assert run.planned == run.resident


@pytest.mark.parametrize("dtype", ["auto", "native"])
@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 3}, {"tp": 2, "pp": 2}])
def test_splits_are_equal(packed: Path, dtype: str, split: dict[str, int]) -> None:
    reference = run_mesh(packed, PROMPT, steps=16, dtype=dtype)[0]
    runs = run_mesh(packed, PROMPT, steps=16, dtype=dtype, **split)
    assert_equal(runs, reference)
    assert all(run.planned == run.resident for run in runs)


def test_a_rank_s_shard_keeps_bits_group_size_and_mode_and_the_overrides_of_single_layers(packed: Path) -> None:
    """Case 4."""
    for run in run_mesh(packed, PROMPT, tp=2, dtype="native"):
        modules: dict[str, Any] = modules_of(run.parts[0])
        kinds = {
            path: (m.group_size, m.bits, m.mode) for path, m in modules.items() if isinstance(m, nn.QuantizedLinear)
        }
        assert kinds["model.layers.0.self_attn.q_proj"] == (32, 4, "affine")
        assert kinds["model.layers.1.self_attn.q_proj"] == (64, 8, "affine")
        assert kinds["model.layers.2.mlp.down_proj"] == (32, 8, "affine")
        assert isinstance(modules["model.layers.3.self_attn.k_proj"], nn.Linear)
        assert modules["model.layers.0.self_attn.q_proj"].weight.shape == (32, 64 * 4 // 32)
        assert modules["model.layers.0.self_attn.o_proj"].weight.shape == (64, 32 * 4 // 32)


@pytest.mark.parametrize(("mode", "group_size", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_modes_with_small_floats_are_read_and_split(
    tmp_path: Path, plain: Path, mode: str, group_size: int, bits: int
) -> None:
    folder = quantise_tiny(tmp_path / "m", plain, group_size=group_size, bits=bits, mode=mode)
    reference = from_mlx_lm(folder, PROMPT, 8)
    for dtype in ("auto", "native"):
        assert_equal(run_mesh(folder, PROMPT, steps=8, dtype=dtype, tp=2), reference)


def test_a_layer_of_another_kind_that_the_config_does_not_name_is_read_by_its_shapes(
    tmp_path: Path, plain: Path
) -> None:
    overrides = {"model.layers.1.self_attn.q_proj": {"group_size": 64, "bits": 8}}
    folder = quantise_tiny(
        tmp_path / "m", plain, group_size=32, bits=4, mode="affine", overrides=overrides, list_overrides=False
    )
    assert_equal(run_mesh(folder, PROMPT, steps=8), from_mlx_lm(folder, PROMPT, 8))


def test_what_would_cut_a_quantisation_group_is_computed_whole_on_every_rank_and_it_says_so(packed: Path) -> None:
    reference = run_mesh(packed, PROMPT, steps=8)[0]
    runs = run_mesh(packed, PROMPT, tp=4, steps=8)
    assert_equal(runs, reference)
    for run in runs:
        (remark,) = run.warnings
        assert re.search(r"attention is computed whole on every tensor rank: .*4 .* 8 heads and 2 kv-heads", remark)
        assert modules_of(run.parts[0])["model.layers.0.self_attn.q_proj"].weight.shape == (64, 64)


def test_an_unknown_mode_is_an_error(tmp_path: Path, packed: Path) -> None:
    """Case 4."""
    for table in ({"group_size": 32, "bits": 4, "mode": "q7"}, {"group_size": 32, "bits": 4, "x": {"mode": "q7"}}):
        folder = copy_with(tmp_path / "m", packed, quantization=table)
        with pytest.raises(ModelError, match="unknown quantisation mode 'q7'"):
            load_part(folder, Part((0, 5), 5))


def test_an_entry_that_contradicts_the_file_is_an_error(tmp_path: Path, packed: Path) -> None:
    table = {"group_size": 32, "bits": 4, "model.layers.1.self_attn.q_proj": {"group_size": 32, "bits": 4}}
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj"):
        load_part(copy_with(tmp_path / "m", packed, quantization=table), Part((0, 5), 5))


def test_a_foreign_method_is_refused_with_the_way_out(tmp_path: Path, packed: Path) -> None:
    folder = copy_with(
        tmp_path / "m", packed, quantization=None, quantization_config={"quant_method": "gptq", "bits": 4}
    )
    with pytest.raises(ModelError, match=r"gptq.*mlx_lm\.convert"):
        load_part(folder, Part((0, 5), 5))


def test_half_precision_files_become_float32_on_a_cpu_and_stay_in_native(tmp_path: Path, plain: Path) -> None:
    weights = {name: array.astype(mx.bfloat16) for name, array in mx.load(str(plain / "model.safetensors")).items()}
    folder = make_tiny(tmp_path / "m", num_key_value_heads=2)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    native = load_part(folder, Part((0, 5), 5), dtype="native")
    wide = load_part(folder, Part((0, 5), 5))
    assert (native.dtype, wide.dtype) == ("bfloat16", "float32")
    assert wide.resident_bytes == 2 * native.resident_bytes
    for name, array in weights.items():
        if name == "model.embed_tokens.weight":
            assert mx.array_equal(wide.model.model.embed_tokens.weight, array.astype(mx.float32)).item()
            assert mx.array_equal(native.model.model.embed_tokens.weight, array).item()
    x = native.forward(mx.array([PROMPT]), native.make_cache())
    assert x.dtype == mx.bfloat16
    assert np.isfinite(np.array(x.astype(mx.float32))).all()


def copy_with(folder: Path, source: Path, **changes: Any) -> Path:
    """A copy of a model folder with other words in its config; None takes a key out."""
    folder.mkdir(exist_ok=True)
    config = {**json.loads((source / "config.json").read_bytes()), **changes}
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    return folder
