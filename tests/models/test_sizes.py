"""What is found out about a model without its weights is what it takes: of published configurations, within 1 %."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import architecture, catalogue, sizes
from mlxcel_nb.models.loading import Part, load_part
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.plan.facts import ModelFacts
from tests.published import PUBLISHED
from tests.tiny import make_tiny, quantise_tiny

CHUNK = 256


def as_built(config: dict[str, Any]) -> Any:
    """mlx-lm's own model in the published dtype, packed as its own loading packs it; nothing is evaluated."""
    model = architecture.build(copy.deepcopy(config))
    if config["model_type"] == "gemma3_text":  # the files have no head: it reads the embedding
        model.pop("lm_head")
        model.tie_word_embeddings = True
    if table := config.get("quantization"):
        nn.quantize(model, group_size=table["group_size"], bits=table["bits"])
    dtype = getattr(mx, config["torch_dtype"])
    model.update(tree_map(lambda x: x.astype(dtype) if mx.issubdtype(x.dtype, mx.floating) else x, model.parameters()))
    return model


def nbytes(model: Any) -> int:
    return sum(array.nbytes for _, array in named_arrays(model))


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configurations_take_what_the_plan_says(kind: str) -> None:
    published = PUBLISHED[kind]
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    facts = sizes.gather(copy.deepcopy(published.config), name=kind)
    model = as_built(published.config)
    assert facts.weights == pytest.approx(nbytes(model), rel=0.001)
    plain = architecture.build(copy.deepcopy(published.config))
    count = sum(array.size for name, array in named_arrays(plain) if "lm_head" not in name or not tied(kind))
    assert count == pytest.approx(published.parameters, rel=0.01)

    # Past the window, where there is one; each chunk whole, as the plan counts the most that is ever held.
    tokens = (6 if "sliding_window" in published.config else 2) * CHUNK
    cache = make_prompt_cache(model)
    for start in range(0, tokens, CHUNK):
        model(mx.zeros((1, min(CHUNK, tokens - start)), mx.int32), cache=cache)
    held = sum(each.nbytes for each in cache)
    planned = sum(layer.cache_at(tokens) for layer in facts.ranks[1][0].layers)
    assert planned == pytest.approx(held, rel=0.01)
    assert mx.get_peak_memory() - active < 1 << 20, "something was computed"


def tied(kind: str) -> bool:
    return kind == "sliding window"


CACHED = [name for name in catalogue.architectures() if (one := catalogue.entry(name)) and not one.fails]


@pytest.mark.parametrize("name", CACHED[::5])
def test_caches_of_tiny_models_hold_what_the_plan_says(name: str) -> None:
    """Windows of 8 tokens, chunks of 16: for real, evaluated."""
    one = catalogue.entry(name)
    assert one is not None
    config = {**copy.deepcopy(one.config), "torch_dtype": "float32"}
    facts = sizes.gather(config, name=name, chunk=16)
    model = catalogue.build(one)
    cache = make_prompt_cache(model)
    for _ in range(4):
        model(mx.zeros((1, 16), mx.int32), cache=cache)
        mx.eval([each.state for each in cache])
    held = sum(each.nbytes for each in cache)
    planned = sum(layer.cache_at(64) for layer in facts.ranks[1][0].layers)
    assert planned == pytest.approx(held, rel=0.01)


KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied and biased": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "quantised": {"num_key_value_heads": 2},
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("sizes")
    made = make_tiny(base / "m", torch_dtype="float32", **KINDS[request.param])
    if request.param == "quantised":
        return quantise_tiny(base / "q", made, group_size=32, bits=4, mode="affine")
    return made


def look(folder: Path, *, files: bool = True, **how: Any) -> ModelFacts:
    entries = weight_files(folder) if files else None
    return sizes.gather(architecture.read_config(folder), name="tiny", folder=folder, entries=entries, **how)


@pytest.mark.parametrize("dtype", ["native", "float32"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_every_part_takes_what_loading_it_took(folder: Path, dtype: str, tp: int, pp: int) -> None:
    layout = make_layout(5, tp=tp, pp=pp)
    found = [look(folder, files=files, dtype=dtype, ranks=tp) for files in (True, False)]
    for member in range(layout.size):
        stage, number = layout.stage_of(member), layout.rank_of(member)
        part = Part(layout.stages[stage], 5, stage, pp, number, tp)
        resident = load_part(folder, part, dtype=dtype, all_reduce=lambda x: x).resident_bytes
        for facts in found:
            assert facts.ranks[tp][number].weights(part.layers, stage, pp) == resident


@pytest.mark.parametrize("name", CACHED[1::14])
def test_parts_of_every_architecture_take_what_loading_them_takes(name: str, tmp_path: Path) -> None:
    one = catalogue.entry(name)
    assert one is not None
    folder = catalogue.write(one, tmp_path / "m")
    facts = look(folder, ranks=2)
    n = facts.n_layers
    parts = [Part((0, n), n, 0, 1, rank, 2) for rank in range(2)]
    if not facts.unstaged:
        parts += [Part((0, 2), n, 0, 2), Part((2, n), n, 1, 2)]
    for part in parts:
        resident = load_part(folder, part, dtype="native", all_reduce=lambda x: x).resident_bytes
        planned = facts.ranks[part.tp_size][part.tp_rank].weights(part.layers, part.stage, part.n_stages)
        assert planned == resident, part


def test_a_model_that_runs_its_layers_twice_over_takes_them_twice_a_token(tmp_path: Path) -> None:
    """And what stands beside a layer for it alone, gates here, is of that layer's stage."""
    one = catalogue.entry("iquestloopcoder")
    assert one is not None
    folder = catalogue.write(one, tmp_path / "m")
    facts = look(folder)
    assert facts.laps == 2
    assert not facts.unstaged
    assert all(layer.active == 2 * layer.weights for layer in facts.ranks[1][0].layers)
    n = facts.n_layers
    for part in (Part((0, 2), n, 0, 3), Part((2, n - 1), n, 1, 3), Part((n - 1, n), n, 2, 3)):
        resident = load_part(folder, part, dtype="native").resident_bytes
        assert facts.ranks[1][0].weights(part.layers, part.stage, 3) == resident


def test_ranks_that_differ_are_counted_each_for_itself(tmp_path: Path) -> None:
    """Case 1: 6 heads over 2 kv-heads are shared unevenly by 4 ranks; 7 ranks are refused with the sizes that work."""
    six = make_tiny(tmp_path / "six", num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    facts = look(six, ranks=7)
    queries = [2, 1, 2, 1]
    for rank, heads in zip(facts.ranks[4], queries, strict=True):
        projections = 2 * heads * 8 * 64 * 4 + 2 * 1 * 8 * 64 * 4
        assert rank.layers[0].weights == projections + 3 * 48 * 64 * 4 + 2 * 64 * 4
        assert rank.layers[0].kv_per_token == 2 * 1 * 8 * 4
    refused = facts.refused[7]
    assert isinstance(refused, ConfigError)
    assert all(number in str(refused) for number in ("6", "2", "7", "1-6"))


def test_a_layer_of_experts_reads_the_chosen_ones() -> None:
    published = PUBLISHED["mixture of experts"]
    facts = sizes.gather(copy.deepcopy(published.config), name="moe")
    layer = facts.ranks[1][0].layers[0]
    experts = 3 * 128 * 1536 * 4096 * 2
    assert layer.weights - layer.active == experts * 15 // 16
    active = sum(each.products for each in facts.ranks[1][0].layers) + facts.ranks[1][0].head_products
    assert active == pytest.approx(22e9, rel=0.05)  # the 22 of its name


def test_a_config_can_be_planned_as_if_converted() -> None:
    config = PUBLISHED["8B dense"].config
    four = sizes.gather(sizes.as_converted(copy.deepcopy(config), 4), name="8B")
    assert four.weights == pytest.approx(nbytes(as_built({**config, "quantization": {"group_size": 64, "bits": 4}})))
    assert four.quantised == "4-bit, groups of 64"
    again = sizes.as_converted({**config, "quantization_config": {"quant_method": "fp8"}}, 16)
    assert sizes.gather(again, name="8B").weights == 2 * 8030261248


def test_smollm2_takes_what_the_plan_says(smollm2: Path) -> None:
    facts = look(smollm2, ranks=2)
    assert facts.ranks[1][0].layers[0].kv_per_token == 2 * 3 * 64 * 4
    for number in range(2):
        part = Part((0, 10), 30, 0, 2, number, 2)
        resident = load_part(smollm2, part, dtype="native", all_reduce=lambda x: x).resident_bytes
        assert facts.ranks[2][number].weights(part.layers, 0, 2) == resident
    assert facts.weights == load_part(smollm2, Part((0, 30), 30), dtype="native").resident_bytes


@pytest.mark.parametrize("name", ["bitnet", "muse_spark", "recurrent_gemma", "prism_hadamard_qwen35"])
def test_odd_ones_are_counted_too(name: str) -> None:
    """Kernels for another machine; a head that is dropped on reading; modules that are packed from the beginning."""
    one = catalogue.entry(name)
    assert one is not None
    facts = sizes.gather({**copy.deepcopy(one.config), "torch_dtype": "float32"}, name=name)
    model = architecture.build(copy.deepcopy(one.config))
    real = sum(array.nbytes for path, array in named_arrays(model) if path not in one.absent)
    assert facts.weights == pytest.approx(real, rel=0.01)
    told = any("counted by config.json" in note for note in facts.notes)
    assert told == (bool(one.fails) and not mx.metal.is_available())
    assert sum(layer.cache_at(64) for layer in facts.ranks[1][0].layers)


def test_what_ranks_do_not_share_is_said() -> None:
    one = catalogue.entry("bitnet")
    assert one is not None
    facts = sizes.gather(copy.deepcopy(one.config), name="bitnet", ranks=2)
    assert any(note.startswith("tp2: ") and "whole on every tensor rank" in note for note in facts.notes)
