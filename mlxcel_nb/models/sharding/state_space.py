"""Recurrences whose state belongs to channels or to heads: state spaces, short convolutions, gated recurrences.

A channel's state never meets another's, so channels are cut like the hidden units of a feed-forward: rows of what goes
in, columns of what comes out. What is made of all channels at once (step sizes, B and C in Mamba) is a sum over the
ranks of its own; a norm over all channels adds up their squares. For the MLX thread.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from mlxcel_nb.models.sharding.block import Block, Whole
from mlxcel_nb.models.sharding.standins import AllReduce, SpreadGatedNorm, become, summed
from mlxcel_nb.plan.cuts import scaled


def mamba(block: Block) -> None:
    """Mamba's selective state space, each channel its own: also Jamba's and FalconMamba's."""
    width = block.inputs("out_proj")
    span = block.rank.units(width, _unit(block, "out_proj", "x_proj"))
    block.rows("in_proj", [span, scaled(span, 1, width)])
    block.channels("conv1d", [span])
    block.columns("x_proj", [span])
    block.join("x_proj", summed)
    block.rows("dt_proj", [span])
    for name in ("A_log", "D"):
        block.array(name, 0, [span], "rows")
    block.whole("dt_layernorm", "b_layernorm", "c_layernorm")
    block.columns("out_proj", [span])
    block.join("out_proj", summed)
    block.set("intermediate_size", span[1] - span[0])
    block.state(0, 2, [span], width)
    block.state(1, 1, [span], width)


def mamba2(block: Block) -> None:
    """The state space by heads, some of which share a B and a C as queries share a key."""
    module = block.module
    heads, groups, size, state = module.num_heads, module.n_groups, module.head_dim, module.ssm_state_size
    width = heads * size
    share = block.rank.heads(heads, groups, size, _unit(block, "out_proj"))
    channels, states = scaled(share.queries, size), scaled(share.keys, state)
    inner = [channels, scaled(states, 1, width), scaled(states, 1, width + groups * state)]
    block.rows("in_proj", [
        channels, *(scaled(span, 1, width) for span in inner),
        scaled(share.queries, 1, 2 * width + 2 * groups * state),
    ], "kv-groups")  # fmt: skip
    block.channels("conv1d", inner, "kv-groups")
    for name in ("A_log", "D", "dt_bias"):
        block.array(name, 0, [share.queries], "heads")
    if "norm.weight" in block.shapes:
        block.array("norm.weight", 0, [channels], "heads")
        group = getattr(module.norm, "group_size", None)
        if group is None:
            block.join("norm", partial(_spread_gated, width=width))
        elif channels[0] % group or channels[1] % group:
            raise Whole(f"ranks would share a group of {group} channels that is normed as one")
    block.columns("out_proj", [channels], "heads")
    block.join("out_proj", summed)
    block.set("num_heads", share.n_queries)
    block.set("n_groups", share.n_keys)
    block.set("intermediate_size", share.n_queries * size)
    block.set("conv_dim", share.n_queries * size + 2 * share.n_keys * state)
    block.state(0, 2, inner, width + 2 * groups * state)
    block.state(1, 1, [share.queries], heads)
    if hasattr(module, "heads_per_group"):
        block.set("heads_per_group", share.n_queries // share.n_keys)


def _spread_gated(module: Any, all_reduce: AllReduce, *, width: int) -> None:
    eps = getattr(module, "eps", None) or module.variance_epsilon
    before = getattr(module, "norm_before_gate", False)
    become(module, SpreadGatedNorm, all_reduce=all_reduce, width=width, epsilon=eps, norm_first=before)


def plamo2_mamba(block: Block) -> None:
    """PLaMo 2's state space: a gate beside each head, one B and one C for all, step sizes by heads."""
    module = block.module
    size = module.hidden_size_per_head
    share = block.rank.heads(module.num_heads, module.num_heads, size, _unit(block, "out_proj", "bcdt_proj"))
    channels = [scaled(share.queries, size)]
    block.rows("in_proj", [scaled(share.queries, 2 * size)], "heads")
    block.channels("conv1d", channels)
    block.columns("bcdt_proj", channels, "heads")
    block.join("bcdt_proj", summed)
    block.rows("dt_proj", [share.queries], "heads")
    for name in ("A_log", "D", "dt_bias"):
        block.array(name, 0, [share.queries], "heads")
    block.whole("dt_norm_weight", "B_norm_weight", "C_norm_weight")
    block.columns("out_proj", channels, "heads")
    block.join("out_proj", summed)
    block.set("num_heads", share.n_queries)
    block.set("intermediate_size", share.n_queries * size)
    block.state(0, 2, channels, module.num_heads * size)
    block.state(1, 1, [share.queries], module.num_heads)


def short_convolution(block: Block) -> None:
    """LFM2's: channels gated, convolved over a few positions, gated again."""
    width = block.inputs("out_proj")
    span = block.rank.units(width, _unit(block, "out_proj"))
    block.rows("in_proj", [scaled(span, 1, part * width) for part in range(3)])
    block.channels("conv", [span])
    block.columns("out_proj", [span])
    block.join("out_proj", summed)
    own = copy.copy(block.module.args)
    own.hidden_size = span[1] - span[0]  # the width of the state that a cache begins with
    block.set("args", own)
    block.state(0, 2, [span], width)


def gated_recurrence(block: Block) -> None:
    """Griffin's: a linear recurrence of channels whose gates mix the channels of a head."""
    heads = block.module.num_heads
    size = block.inputs("linear_out") // heads
    share = block.rank.heads(heads, heads, size, _unit(block, "linear_out"))
    channels = [scaled(share.queries, size)]
    block.rows("linear_x", channels, "heads")
    block.rows("linear_y", channels, "heads")
    block.channels("conv_1d", channels)
    block.array("rg_lru.recurrent_param", 0, channels, "heads")
    for gate in ("input", "recurrent"):
        for leaf in ("weight", "bias"):
            block.array(f"rg_lru.{gate}_gate_{leaf}", 0, [share.queries], "heads")
    block.columns("linear_out", channels, "heads")
    block.join("linear_out", summed)
    block.set("num_heads", share.n_queries, at="rg_lru")
    block.set("width", share.n_queries * size, at="rg_lru")
    block.state(0, 2, channels, heads * size)
    block.state(1, 1, channels, heads * size)


def _unit(block: Block, *names: str) -> int:
    return block.rank.common(block.group(name) for name in names)
