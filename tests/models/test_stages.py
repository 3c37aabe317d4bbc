"""Every architecture let into `STAGED` gives the whole model's logits, bit for bit, from its stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import architecture, stages
from mlxcel_nb.plan.part import Part, whole
from tests.models.mesh import run_mesh
from tests.tiny import CONFIG

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 2},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "starcoder2": {"model_type": "starcoder2", "norm_epsilon": 1e-5},
}  # fmt: skip


def make_random(folder: Path, config: dict[str, Any]) -> Path:
    """A model folder of any architecture: the weights mlx-lm draws for it, with norms moved off one."""
    mx.random.seed(0)
    weights = dict(stages.named_arrays(architecture.build(config)))
    weights = {name: array + 0.1 * mx.random.normal(array.shape) for name, array in weights.items()}
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def test_every_architecture_that_is_let_in_is_tested_here() -> None:
    assert set(ARCHITECTURES) == stages.STAGED


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stages_are_bit_equal_to_the_whole(name: str, tmp_path: Path) -> None:
    folder = make_random(tmp_path / "m", {**CONFIG, **ARCHITECTURES[name]})
    prompt = [(i * 7 + 3) % 256 for i in range(40)]
    (whole_run,) = run_mesh(folder, prompt, steps=4)
    assert np.abs(whole_run.prompt_logits).max() > 1e-3
    for split in ({"pp": 5}, {"layers": "0,1-2,3-4", "chunk": 16}):
        (run,) = run_mesh(folder, prompt, steps=4, **split)
        assert run.tokens == whole_run.tokens
        if "chunk" not in split:
            assert np.array_equal(run.prompt_logits, whole_run.prompt_logits)


def test_the_skeleton_of_a_tied_and_of_an_untied_model() -> None:
    for tied in (True, False):
        model = architecture.build({**CONFIG, "tie_word_embeddings": tied})
        found = stages.find_skeleton(model, 5)
        assert found is not None
        assert (found.layer_path(3), found.embedding_path) == ("model.layers.3", "model.embed_tokens")
        assert found.tied is tied
        assert found.heads == (() if tied else ("lm_head",))


def test_a_pruned_stage_wants_the_weights_of_its_own_layers_alone() -> None:
    def wanted(part: Part, *, tied: bool) -> set[str]:
        model = architecture.build({**CONFIG, "tie_word_embeddings": tied})
        skeleton = stages.find_skeleton(model, 5)
        assert skeleton is not None
        stages.prune(skeleton, part)
        return {".".join(name.split(".")[:3]) for name, _ in stages.named_arrays(model)}

    table, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    assert wanted(Part((0, 2), 5, 0, 3), tied=True) == {table, "model.layers.0", "model.layers.1"}
    assert wanted(Part((2, 4), 5, 1, 3), tied=True) == {"model.layers.2", "model.layers.3"}
    assert wanted(Part((4, 5), 5, 2, 3), tied=True) == {table, "model.layers.4", norm}
    assert wanted(Part((4, 5), 5, 2, 3), tied=False) == {"model.layers.4", norm, head}
    assert wanted(Part((4, 5), 5, 2, 3, 1, 2), tied=True) == {"model.layers.4"}
    assert len(wanted(whole(5), tied=False)) == 8


def test_pass_throughs_answer_for_the_attributes_models_read() -> None:
    model = architecture.build(
        {**CONFIG, "sliding_window": 8, "layer_types": ["full_attention"] + ["sliding_attention"] * 4}
    )
    skeleton = stages.find_skeleton(model, 5)
    assert skeleton is not None
    stages.prune(skeleton, Part((0, 2), 5, 0, 2))
    stages.join(skeleton, Part((0, 2), 5, 0, 2), stages.Switches())
    assert [layer.use_sliding for layer in model.layers] == [False, True, True, True, True]
    assert len(model.make_cache()) == 5


def test_stages_of_an_unknown_structure_are_refused_and_one_stage_is_not() -> None:
    stages.check_stages(None, "anything", whole(5))
    with pytest.raises(ConfigError, match="anything"):
        stages.check_stages(None, "anything", Part((0, 2), 5, 0, 2))
