"""Multi-head latent attention: the heads are cut, the low-rank products before them stay whole. For the MLX thread.

Every rank compresses keys and values alike, for all heads read the same latent, and unpacks them for its heads alone.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.sharding.attention import GATES, OUTPUTS, QUERY_COUNTS, _count
from mlxcel_nb.models.sharding.block import Block, Whole
from mlxcel_nb.models.sharding.standins import AllReduce, summed
from mlxcel_nb.plan.cuts import scaled
from mlxcel_nb.plan.kv_shares import KvShare

LATENT = ("kv_a_proj_with_mqa", "kv_a_layernorm", "q_a_proj", "q_a_layernorm", "indexer")
"""What all heads share."""

PER_HEAD = ("q_b_proj", "q_proj", "kv_b_proj", *GATES)
"""Products whose outputs belong to heads."""

UNPACKING = ("embed_q", "unembed_out")
"""Products that are a matrix for each head."""


def latent_attention(block: Block) -> None:
    """DeepSeek's attention, unpacked in the cache or absorbed into the queries, with or without an indexer."""
    output = block.one_of(OUTPUTS)
    n_heads = _count(block.module, QUERY_COUNTS)
    if output is None or n_heads is None:
        raise Whole("its products are not known")
    columns = block.inputs(output) // n_heads
    share = block.rank.heads(n_heads, n_heads, columns)
    for name in PER_HEAD:
        if f"{name}.weight" in block.shapes:
            if block.outputs(name) % n_heads:
                raise Whole(f"{name} does not belong to heads")
            block.rows(name, [scaled(share.queries, block.outputs(name) // n_heads)], "heads")
    for name in UNPACKING:
        if f"{name}.weight" in block.shapes:
            block.array(f"{name}.weight", 0, [share.queries], "heads")
    if "kv_b_proj.weight" in block.shapes:  # unpacked before they are kept; else all ranks keep the latent
        block.kv_heads = KvShare(*share.queries, n_heads)
    block.whole(*LATENT)
    block.columns(output, [scaled(share.queries, columns)], "heads")
    block.join(output, summed)
    for name in (*QUERY_COUNTS, "num_key_value_heads"):
        if getattr(block.module, name, None) == n_heads:
            block.set(name, share.n_queries)


def grouped_output_attention(block: Block) -> None:
    """DeepSeek-V4's: one key for all heads, whose outputs are projected group by group; groups are cut."""
    module = block.module
    heads, groups = module.num_heads, module.o_groups
    rank_size = block.outputs("o_a_proj")
    span = block.rank.units(groups, math.lcm(rank_size, block.group("o_b_proj")) // rank_size)
    own = scaled(span, heads // groups)
    block.rows("q_b_proj", [scaled(own, module.head_dim)], "heads")
    block.array("sinks", 0, [own], "heads")
    block.array("o_a_proj.weight", 0, [span], "heads")
    block.columns("o_b_proj", [scaled(span, rank_size)], "heads")
    block.join("o_b_proj", summed)
    block.whole("q_a_proj", "q_a_norm", "kv_proj", "kv_norm", "compressor", "indexer")
    block.set("num_heads", own[1] - own[0])
    block.set("o_groups", span[1] - span[0])
    block.join("", partial(_numbered, groups=span[1] - span[0]))


def _numbered(module: Any, _: AllReduce, *, groups: int) -> None:
    module._group_ids = mx.arange(groups)[None]
