"""Multi-head latent attention: the heads are cut, the low-rank products before them stay whole. For the MLX thread.

Every rank compresses keys and values alike, for all heads read the same latent, and unpacks them for its heads alone.
"""

from __future__ import annotations

from mlxcel_nb.models.sharding.attention import GATES, OUTPUTS, QUERY_COUNTS, _count
from mlxcel_nb.models.sharding.block import Block, Whole
from mlxcel_nb.models.sharding.standins import summed
from mlxcel_nb.plan.cuts import scaled

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
    block.whole(*LATENT)
    block.columns(output, [scaled(share.queries, columns)], "heads")
    block.join(output, summed)
    for name in (*QUERY_COUNTS, "num_key_value_heads"):
        if getattr(block.module, name, None) == n_heads:
            block.set(name, share.n_queries)
