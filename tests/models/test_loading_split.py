"""Any split of a model gives the logits of the whole, and the whole gives mlx-lm's own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import stages
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.part import Part
from tests.models.mesh import Run, assert_equal, run_mesh
from tests.tiny import CONFIG, make_tiny, random_weights

PROMPT = [(i * 7 + 3) % 256 for i in range(40)]
LONG = [(i * i + 5 * i) % 256 for i in range(300)]

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tie_word_embeddings": False},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A maker of tiny variants by name, each made once."""
    base = tmp_path_factory.mktemp("tiny")
    return functools.cache(lambda name: make_tiny(base / name, **VARIANTS[name]))


@pytest.fixture(scope="module")
def single(tiny: Any) -> Any:
    """The variant in one process: prompt and 64 greedy tokens."""
    return functools.cache(lambda name: run_mesh(tiny(name), PROMPT, steps=64)[0])


def from_mlx_lm(folder: Path, prompt: list[int], steps: int) -> Run:
    """The same by mlx-lm's own loader and model."""
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    cache = make_prompt_cache(model)
    run = Run(prompt_logits=np.array(model(mx.array([prompt]), cache=cache))[0])
    row = run.prompt_logits[-1]
    for _ in range(steps):
        run.tokens.append(int(row.argmax()))
        row = np.array(model(mx.array([run.tokens[-1:]]), cache=cache))[0, -1]
        run.step_logits.append(row)
    return run


@pytest.mark.parametrize("name", VARIANTS)
def test_the_whole_model_in_one_part_is_mlx_lm_s_own(name: str, tiny: Any, single: Any) -> None:
    assert_equal([single(name)], from_mlx_lm(tiny(name), PROMPT, 64))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("pp", [2, 3, 5])
def test_stages_give_the_whole_model_s_logits(name: str, pp: int, tiny: Any, single: Any) -> None:
    """Case 5."""
    assert_equal(run_mesh(tiny(name), PROMPT, pp=pp, steps=64), single(name))


@pytest.mark.parametrize("tp", [2, 3, 4, 5, 6, 7, 8])
def test_any_number_of_ranks_up_to_the_heads_is_equal(tp: int, tiny: Any, single: Any) -> None:
    """Case 3."""
    assert_equal(run_mesh(tiny("llama"), PROMPT, tp=tp, steps=64), single("llama"))


@pytest.mark.parametrize("name", ["untied", "biased", "mistral", "qwen2", "qwen3", "llama3-rope"])
@pytest.mark.parametrize("tp", [2, 3])
def test_ranks_are_equal_across_the_family(name: str, tp: int, tiny: Any, single: Any) -> None:
    assert_equal(run_mesh(tiny(name), PROMPT, tp=tp, steps=64), single(name))


def test_a_mesh_of_both_kinds_is_equal(tiny: Any, single: Any) -> None:
    assert_equal(run_mesh(tiny("llama"), PROMPT, tp=2, pp=2, steps=64), single("llama"))


@pytest.mark.parametrize("length", [128, 129, 255, 300])
def test_one_layer_in_stage_0_and_prompts_at_the_edges_of_chunks(length: int, tiny: Any) -> None:
    """Case 6."""
    prompt = LONG[:length]
    reference = run_mesh(tiny("llama"), prompt, steps=4)[0]
    (run,) = run_mesh(tiny("llama"), prompt, layers="0,1-2,3-4", chunk=128, steps=4)
    assert run.offsets == [[length] * 5] * 3
    assert_equal([run], reference)


def test_every_rank_holds_only_its_share(tiny: Any) -> None:
    runs = run_mesh(tiny("llama"), PROMPT, tp=4, pp=2)
    table = 257 * 64 * 4
    layer = (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192) * 4 // 4
    norms = 2 * 64 * 4
    for rank, run in enumerate(runs):
        assert run.resident == run.planned
        head = 0 if rank else table + 64 * 4  # where sampling happens
        assert run.planned == [table + 3 * (layer + norms), head + 2 * (layer + norms)]


def test_each_query_head_reads_its_own_kv_head(tmp_path: Path) -> None:
    """Case 2: 8 heads, 2 kv-heads, 4 ranks: with a constant V per kv-head, the layer's output tells which was read."""
    weights = random_weights({**CONFIG, "num_key_value_heads": 2, "num_hidden_layers": 1})
    prefix = "model.layers.0."
    weights["model.embed_tokens.weight"][:, 0] = 1.0  # V reads one constant feature alone
    value = np.zeros((16, 64), np.float32)
    value[:8, 0], value[8:, 0] = 1.0, -1.0
    weights[prefix + "self_attn.v_proj.weight"] = value
    weights[prefix + "self_attn.o_proj.weight"] = np.eye(64, dtype=np.float32)
    weights[prefix + "mlp.down_proj.weight"] *= 0
    folder = make_tiny(tmp_path / "m", weights=weights, num_key_value_heads=2, num_hidden_layers=1)
    reference = run_mesh(folder, PROMPT, n_layers=1, steps=8)[0]
    runs = run_mesh(folder, PROMPT, n_layers=1, tp=4, steps=8)
    assert_equal(runs, reference)
    for rank, run in enumerate(runs):
        held = np.array(run.parts[0].model.model.layers[0].self_attn.v_proj.weight[:, 0])
        assert held.tolist() == [1.0 if rank < 2 else -1.0] * 8


def test_layers_are_reported_in_order_after_each_is_evaluated_and_not_in_decode(tiny: Any) -> None:
    part = load_part(tiny("llama"), Part((1, 4), 5, 1, 3))
    cache = part.make_cache()
    seen: list[int] = []
    hidden = mx.zeros((1, 3, 64))
    part.forward({"hidden": hidden}, cache, lambda layer, _: seen.append(layer))
    assert seen == [1, 2, 3]
    part.forward({"hidden": hidden}, cache)
    assert seen == [1, 2, 3]


def test_what_on_layer_raises_leaves_the_chunk_and_the_part_stays_usable(tiny: Any) -> None:
    part = load_part(tiny("llama"), Part((0, 5), 5))

    def stop(layer: int, _: mx.array) -> None:
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        part.forward(mx.array([PROMPT]), part.make_cache(), stop)
    again = part.forward(mx.array([PROMPT]), part.make_cache(), all_logits=True)
    assert np.array_equal(np.array(again)[0], run_mesh(tiny("llama"), PROMPT)[0].prompt_logits)


def test_the_last_stage_gives_one_position_unless_asked(tiny: Any) -> None:
    part = load_part(tiny("llama"), Part((0, 5), 5))
    every = part.forward(mx.array([PROMPT]), part.make_cache(), all_logits=True)
    last = part.forward(mx.array([PROMPT]), part.make_cache())
    assert every.shape == (1, 40, 257)
    assert last.shape == (1, 1, 257)
    assert mx.allclose(every[:, -1:], last, atol=1e-5).item()


def test_ranks_that_do_not_sample_give_activations_and_make_no_logits(tiny: Any) -> None:
    part = load_part(tiny("untied"), Part((0, 5), 5, 0, 1, 1, 2), all_reduce=lambda x: x)
    assert part.forward(mx.array([PROMPT]), part.make_cache())["hidden"].shape == (1, 40, 64)
    assert not any(name.startswith("lm_head") for name, _ in stages.named_arrays(part.model))


def test_ranks_without_an_all_reduce_are_refused(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="all-reduce"):
        load_part(tiny("llama"), Part((0, 5), 5, 0, 1, 0, 2))
