"""The plan's bytes are the loader's bytes, for every kind of part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.models.architecture import read_config
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.plan.memory import PartMemory, Tensor, part_memory
from mlxcel_nb.plan.part import Part, whole
from tests.models.mesh import run_mesh
from tests.tiny import make_tiny, quantise_tiny

KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied and biased": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "quantised": {"num_key_value_heads": 2},
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("memory")
    folder = make_tiny(base / "m", **KINDS[request.param])
    if request.param == "quantised":
        return quantise_tiny(base / "q", folder, group_size=32, bits=4, mode="affine")
    return folder


def planned(folder: Path, part: Part, float_bytes: int | None) -> PartMemory:
    tensors = {name: Tensor(entry.dtype, entry.shape) for name, entry in weight_files(folder).items()}
    return part_memory(tensors, read_config(folder), part, float_bytes=float_bytes)


@pytest.mark.parametrize(("dtype", "float_bytes"), [("auto", 4), ("native", None)])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_it_says_what_loading_takes(model: Path, dtype: str, float_bytes: int | None, tp: int, pp: int) -> None:
    runs = run_mesh(model, [1, 2, 3], tp=tp, pp=pp, dtype=dtype)
    for run in runs:
        for part, resident in zip(run.parts, run.resident, strict=True):
            assert planned(model, part.part, float_bytes).weights == resident


def test_keys_and_values_follow_layers_and_kv_heads(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "m")
    assert planned(folder, whole(5), 4).kv_per_token == 2 * 5 * 4 * 8 * 4
    assert planned(folder, Part((2, 5), 5, 1, 2), 4).kv_per_token == 2 * 3 * 4 * 8 * 4
    assert planned(folder, Part((0, 5), 5, 0, 1, 3, 8), 4).kv_per_token == 2 * 5 * 1 * 8 * 4
    memory = planned(folder, whole(5), 2)
    assert memory.at(100) == memory.weights + 100 * 2 * 5 * 4 * 8 * 2


def test_a_part_that_contradicts_itself_is_refused() -> None:
    from mlxcel_nb.errors import ConfigError

    for wrong in ((0, 0), (3, 2), (0, 6)):
        with pytest.raises(ConfigError):
            Part(wrong, 5)
    with pytest.raises(ConfigError):
        Part((0, 5), 5, 0, 2)
    with pytest.raises(ConfigError):
        Part((0, 5), 5, 0, 1, 2, 2)
