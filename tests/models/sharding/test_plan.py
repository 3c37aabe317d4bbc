"""What a plan says: which ranges of which arrays, what is left whole and why. No weight is read."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.models import architecture, sharding
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.plan.cuts import cut
from mlxcel_nb.plan.part import Part
from tests.models.sharding.ranks import across, cut_array


def plan_of(name: str, rank: int, size: int, **how: Any) -> tuple[Any, sharding.TensorPlan]:
    entry = ENTRIES[name]
    model = architecture.build(copy.deepcopy(entry.config))
    n = entry.n_layers
    return model, sharding.plan(model, entry.config, Part((0, n), n, 0, 1, rank, size), **how)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "internlm2", "openelm", "mixtral", "mamba2", "plamo"])
def test_all_ranks_together_hold_every_element_and_only_shared_kv_heads_twice(name: str, size: int) -> None:
    plans = [plan_of(name, rank, size) for rank in range(size)]
    for path, array in named_arrays(plans[0][0]):
        held = np.zeros(array.shape, int)
        for _, made in plans:
            share = made.cuts.get(path)
            index: list[Any] = [slice(None)] * array.ndim
            for span in share.ranges if share else [(0, array.shape[0])]:
                index[share.axis if share else 0] = slice(*span)
                held[tuple(index)] += 1
        assert held.min() >= 1
        if held.max() > 1 and held.min() < size:  # more ranks than kv-heads
            assert plans[0][1].cuts[path].how == "kv-groups"


def test_a_fused_product_is_cut_part_by_part() -> None:
    _, made = plan_of("phi3", 1, 3)  # 8 heads of 16 over 4 kv-heads: 2, 1 and 1 kv-heads
    assert made.cuts["model.layers.0.self_attn.qkv_proj.weight"].ranges == ((64, 96), (160, 176), (224, 240))
    assert made.cuts["model.layers.0.self_attn.o_proj.weight"].ranges == ((64, 96),)
    assert made.cuts["model.layers.0.mlp.gate_up_proj.weight"].ranges == ((64, 128), (256, 320))
    _, made = plan_of("internlm2", 1, 3)  # kv-group after kv-group, each of two queries, a key and a value
    assert made.cuts["model.layers.0.attention.wqkv.weight"].ranges == ((128, 192),)


def test_ranks_that_share_a_kv_head_have_their_own_queries_of_its_group() -> None:
    _, made = plan_of("internlm2", 1, 8)  # the second query of the first group, and its key and value
    assert made.cuts["model.layers.0.attention.wqkv.weight"].ranges == ((16, 64),)
    _, made = plan_of("internlm2", 2, 8)
    assert made.cuts["model.layers.0.attention.wqkv.weight"].ranges == ((64, 80), (96, 128))


def test_a_bias_that_is_added_to_a_sum_is_held_by_rank_0_alone() -> None:
    name = "model.layers.0.self_attn.o_proj.bias"
    assert name not in plan_of("granite", 0, 2)[1].dropped
    assert name in plan_of("granite", 1, 2)[1].dropped
    assert "model.layers.0.mlp.experts.down_proj.bias" in plan_of("gpt_oss", 1, 2)[1].dropped


def test_a_mixture_with_shared_experts_has_one_sum_and_a_whole_router() -> None:
    _, made = plan_of("deepseek_v3", 0, 2)
    joins = [path for path, _ in made.joins if ".layers.4." in path]
    assert joins == ["model.layers.4.self_attn.o_proj", "model.layers.4.mlp"]
    assert not any(".mlp.gate." in path for path in made.cuts)
    assert made.cuts["model.layers.4.mlp.switch_mlp.down_proj.weight"].axis == 2
    _, made = plan_of("deepseek_v3", 2, 3, experts="spread")
    share = made.cuts["model.layers.4.mlp.switch_mlp.down_proj.weight"]
    assert (share.how, share.axis, share.ranges) == ("experts", 0, ((6, 8),))
    assert made.cuts["model.layers.4.mlp.shared_experts.up_proj.weight"].how == "rows"


@pytest.mark.parametrize(("name", "sums"), [("llama", 2), ("cohere", 1), ("gpt_neox", 1), ("falcon_h1", 3)])
def test_two_parts_of_a_layer_that_are_added_together_take_one_sum(name: str, sums: int) -> None:
    """Falcon's layers have one for the attention beside the state space, one for its norm, one for the feed-forward."""
    _, made = plan_of(name, 0, 2)
    layer = [path for path, _ in made.joins if ".layers.3." in path or ".h.3." in path]
    pairs = [pair for pair in made.pairs if ".layers.3." in pair[0] or ".h.3." in pair[0]]
    assert len(layer) + len(pairs) == sums
    assert len(pairs) == (name != "llama")


def test_a_layer_whose_parts_follow_each_other_has_two_sums_though_others_of_its_class_have_one() -> None:
    entry = ENTRIES["gpt_neox"]
    config = {**entry.config, "use_parallel_residual": False}
    made = sharding.plan(architecture.build(config), config, Part((0, 7), 7, 0, 1, 0, 2))
    assert (len(made.joins), made.pairs) == (14, [])


def test_what_has_no_rule_stays_whole_and_the_report_says_why() -> None:
    model, made = plan_of("gemma3n", 0, 2)
    assert "feed-forward: whole on every rank, its activation compares all hidden units (2)" in made.report()
    assert "feed-forward: cut (6)" in made.report()
    (remark,) = [line for line in made.remarks() if "feed-forward" in line]
    assert remark.endswith("its activation compares all hidden units")
    model.layers[7].mlp.novel = nn.Linear(4, 4)
    made = sharding.plan(model, ENTRIES["gemma3n"].config, Part((0, 8), 8, 0, 1, 0, 2))
    assert any("layers.7.mlp" in block.path and block.why == "its products are not known" for block in made.blocks)
    assert not any("layers.7.mlp" in path for path in made.cuts)


def test_a_quantised_product_is_cut_between_its_groups() -> None:
    config = {
        "quantization": {"group_size": 64, "bits": 4, "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 8}}
    }
    entry = ENTRIES["llama"]
    model = architecture.build(copy.deepcopy(entry.config))
    shares = [
        sharding.plan(model, {**entry.config, **config}, Part((0, 7), 7, 0, 1, rank, 2)).cuts for rank in range(2)
    ]
    down = [[cuts[f"model.layers.{layer}.mlp.down_proj.weight"].ranges for cuts in shares] for layer in range(2)]
    assert down == [[((0, 128),), ((128, 192),)], [((0, 96),), ((96, 192),)]]
    assert [cuts["model.layers.0.self_attn.o_proj.weight"].ranges for cuts in shares] == [((0, 64),), ((64, 128),)]


def test_one_rank_needs_no_plan_and_several_need_a_sum() -> None:
    model, made = plan_of("llama", 0, 1)
    assert made == sharding.TensorPlan()
    sharding.join(model, made, None)
    model, made = plan_of("llama", 0, 2)
    with pytest.raises(ConfigError, match="all-reduce"):
        sharding.join(model, made, None)


def test_ranges_that_touch_are_one() -> None:
    assert cut("rows", 0, [(0, 2), (2, 5), (7, 7), (8, 9)]).ranges == ((0, 5), (8, 9))
    assert cut("rows", 1, [(1, 3), (4, 5)]).shape((7, 9, 2)) == (7, 3, 2)


class Alone(nn.Module):
    """An attention that is all of a model."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.layers = [attention]

    def __call__(self, x: Any) -> Any:
        return self.layers[0](x)


def test_heads_of_a_block_sparse_attention_keep_their_own_masks() -> None:
    """Phi-3 small's blocks are of 32 positions at least, more than the catalogue's prompt has."""
    entry = ENTRIES["phi3small"]
    x = np.random.default_rng(2).standard_normal((1, 230, 128)).astype(np.float32)

    def member(rank: int, all_reduce: Any) -> Any:
        whole = architecture.build({**entry.config, "num_hidden_layers": 1})
        mx.random.seed(0)
        model = Alone(type(whole.layers[0].self_attn)(whole.args, 0))
        assert model.layers[0].block_sparse
        mx.eval(model.parameters())
        if all_reduce:
            made = sharding.plan(model, entry.config, Part((0, 1), 1, 0, 1, rank, 3))
            sharding.apply(model, made)
            arrays = [(name, mx.array(cut_array(np.array(a), made.cuts.get(name)))) for name, a in named_arrays(model)]
            model.load_weights(arrays, strict=False)
            sharding.join(model, made, all_reduce)
        return np.array(model(mx.array(x)))

    expected = member(0, None)
    for found in across(3, member):
        assert np.abs(found - expected).max() < 1e-4
