"""Every entry of the catalogue runs whole, and mlx-lm gives the same logits token by token as in one go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from docs import draw_catalogue
from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import architecture, catalogue
from mlxcel_nb.models.catalogue import draws, modules
from mlxcel_nb.models.catalogue.families import ENTRIES, FAMILIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.plan.part import whole

PREFILL, DECODE = 17, 8
RUNNING = [name for name, entry in ENTRIES.items() if not entry.fails]
FAILING = [name for name, entry in ENTRIES.items() if entry.fails]


@pytest.fixture(autouse=True, scope="module")
def not_compiled() -> Iterator[None]:
    """MLX's `compile` calls a C++ compiler for each fused kernel on a CPU: minutes over all entries, for nothing."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def ids(batch: int, length: int = PREFILL + DECODE) -> mx.array:
    return mx.array(np.random.default_rng(1).integers(0, 257, (batch, length)).astype(np.int32))


def fresh_cache(model: Any) -> Any:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def stepwise(model: Any, tokens: mx.array) -> Any:
    """Logits of all positions: the prompt at once, then a token at a time."""
    cache = fresh_cache(model)
    parts = [model(tokens[:, :PREFILL], cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(PREFILL, PREFILL + DECODE)]
    return np.array(mx.concatenate(parts, axis=1))


@pytest.mark.parametrize("name", RUNNING)
def test_the_whole_model_decodes_as_it_reads(name: str) -> None:
    """Cached decoding equals one forward over all tokens, so the configuration is one that mlx-lm gets right."""
    entry = ENTRIES[name]
    model = catalogue.build(entry)
    assert len(model.layers) == entry.n_layers
    for batch in (1, 3) if entry.batches else (1,):
        tokens = ids(batch)
        whole = np.array(model(tokens, cache=fresh_cache(model)) if entry.needs_cache else model(tokens))
        steps = stepwise(model, tokens)
        assert steps.shape[:2] == (batch, PREFILL + DECODE)
        given = np.isfinite(steps)  # a token that a model never gives has minus infinity
        assert np.array_equal(given, np.isfinite(whole))
        assert given.mean() > 0.99
        spread = np.std(steps, axis=-1, where=given)
        assert 0.3 < spread.min() < spread.max() < 10
        difference = np.abs(steps[given] - whole[given]).max()
        assert (difference > 1e-4) if entry.drifts else (difference < 1e-4)


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.skipif(mx.metal.is_available(), reason="what fails here for want of Metal runs on a Mac")
def test_what_mlx_lm_itself_cannot_run_on_a_cpu_fails_as_the_entry_says(name: str) -> None:
    entry = ENTRIES[name]
    with pytest.raises((ModelError, RuntimeError)) as caught:
        mx.eval(catalogue.build(entry)(ids(1)))
    assert str(caught.value).startswith(entry.fails)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "olmo"])
def test_every_weight_is_drawn_by_its_name(name: str) -> None:
    """None is left as it was initialised, in the model or in what its files would hold."""
    entry = ENTRIES[name]
    model = architecture.build(json.loads(json.dumps(entry.config)))
    arrays = dict(named_arrays(model))
    drawn = catalogue.weights(entry, model)
    assert set(entry.absent) == set(arrays) - set(drawn)
    for path, array in drawn.items():
        assert array.shape == arrays[path].shape
        assert array.dtype == (mx.float32 if mx.issubdtype(arrays[path].dtype, mx.floating) else arrays[path].dtype)


def test_a_drawn_weight_depends_on_name_shape_and_seed_alone() -> None:
    one = draws.draw("model.layers.3.mlp.up_proj.weight", (192, 128), 0)
    assert np.array_equal(one, draws.draw("model.layers.3.mlp.up_proj.weight", (192, 128), 0))
    assert abs(one.std() - 128**-0.5) < 0.002
    for name, seed in (("model.layers.4.mlp.up_proj.weight", 0), ("model.layers.3.mlp.up_proj.weight", 1)):
        assert abs(np.corrcoef(one.ravel(), draws.draw(name, (192, 128), seed).ravel())[0, 1]) < 0.05
    norm = draws.draw("model.norm.weight", (128,), 0)
    assert abs(norm.mean() - 1) < 0.05


FOLDERS = ["llama", "recurrent_gemma", "falcon_h1", "gemma3n", "baichuan_m1", "qwen3_5", "prism_hadamard_qwen35"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_holds_the_very_model(name: str, tmp_path: Path) -> None:
    """`sanitize` takes its own names and shapes as they are, heads stay tied, and weights that are packed stay so."""
    entry = ENTRIES[name]
    loaded = load_part(catalogue.write(entry, tmp_path, seed=3), whole(entry.n_layers))
    model = catalogue.build(entry, seed=3)
    tokens = ids(1, 11)
    there = loaded.forward(tokens, loaded.make_cache(), all_logits=True)
    assert mx.abs(there - model(tokens, cache=fresh_cache(model))).max().item() < 1e-4  # type: ignore[operator]


def test_a_family_names_each_of_its_entries_once() -> None:
    names = [entry.name for family in FAMILIES for entry in family.ENTRIES]
    assert len(names) == len(set(names))
    assert set(names) <= set(catalogue.architectures())
    for entry in ENTRIES.values():
        assert architecture.module_name(entry.config) == entry.name
        assert entry.features


def test_the_installed_mlx_lm_has_no_architecture_that_is_not_in_the_catalogue() -> None:
    assert catalogue.untested() == []
    assert catalogue.entry("llama") is ENTRIES["llama"]
    assert catalogue.entry("base") is None


def test_what_is_no_decoder_is_no_architecture() -> None:
    assert not {"base", "cache", "mla", "ssm", "rope_utils", "switch_layers"} & set(catalogue.architectures())
    assert {"llama", "glm_moe_dsa", "lfm2-vl", "olmo"} <= set(catalogue.architectures())


def test_a_new_architecture_is_found_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "novel.py").write_text("class ModelArgs: ...\nclass Model: ...\n")
    (tmp_path / "derived.py").write_text("from .novel import Model, ModelArgs\n")
    (tmp_path / "helper.py").write_text("class Attention: ...\n")
    assert modules.scan(tmp_path) == ("derived", "novel")
    monkeypatch.setattr(modules, "architectures", lambda: modules.scan(tmp_path))
    assert catalogue.untested() == ["derived", "novel"]


def test_types_that_share_a_file_are_those_that_mlx_lm_names() -> None:
    """Its own table, read off its source."""
    source = (modules.folder().parent / "utils.py").read_text()
    table = source[source.index("MODEL_REMAPPING = {") : source.index("MAX_FILE_SIZE_GB")]
    for kind, file in architecture.SAME_AS.items():
        assert f'"{kind}": "{file}"' in table
    for (kind, name), file in architecture.SUCCESSORS.items():
        assert f'("{kind}", "{name}"): "{file}"' in table
    assert table.count('": "') + table.count('"): "') == len(architecture.SAME_AS) + len(architecture.SUCCESSORS)


def test_the_table_of_architectures_is_what_the_catalogue_says() -> None:
    drawn = draw_catalogue.draw()
    assert drawn == draw_catalogue.PAGE.lines(), "python -m docs.draw_catalogue --write"
    assert sum(line.startswith("| `") for line in drawn) == len(catalogue.architectures())
