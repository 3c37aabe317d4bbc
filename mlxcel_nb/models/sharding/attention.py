"""Attention with a product each for queries, keys and values, or one that fuses them. For the MLX thread.

A rank gets whole kv-groups: rows of q, k and v, columns of the output product, whose sum over the ranks is the whole's.
Counts of heads are plain attributes of mlx-lm's modules and are set to the rank's. With fewer kv-heads than ranks, the
ranks that share one hold it each.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx import nn

from mlxcel_nb.models.sharding.block import Block, Whole
from mlxcel_nb.models.sharding.standins import AllReduce, MaskedByHead, SpreadNorm, become, claim_width, summed
from mlxcel_nb.plan.cuts import scaled
from mlxcel_nb.plan.kv_shares import KvShare
from mlxcel_nb.plan.shards import HeadShare, Range

QUERIES = ("q_proj", "c_q", "attn_query")
KEYS = ("k_proj", "c_k", "attn_key")
VALUES = ("v_proj", "c_v", "attn_value")
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "attn_resid", "wo")

QUERY_COUNTS = ("n_heads", "num_heads", "num_attention_heads", "q_num_heads", "n_head")
KEY_COUNTS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "k_num_heads", "v_num_heads")
GROUP_COUNTS = ("repeats", "num_key_value_groups", "n_kv_groups", "n_q_per_kv")
"""Attributes that hold query heads, kv-heads, and query heads for each kv-head."""

QUERY_SIZES = ("q_size", "q_proj_dim", "d_model", "dim", "hidden_size")
KEY_SIZES = ("kv_size", "kv_dim", "k_proj_dim", "v_proj_dim")
"""Attributes that hold the features of all query heads and of all kv-heads."""

QUERY_NORMS = ("q_norm", "query_layernorm", "q_layernorm")
KEY_NORMS = ("k_norm", "key_layernorm", "k_layernorm")
QUERY_WEIGHTS = ("sinks", "attention_sink_bias", "q_weight", "head_gain.head_g")
KEY_WEIGHTS = ("k_weight", "conv_k", "conv_v")
"""Arrays of the attention itself with an entry for each head, along the only axis that long."""

CONVOLUTIONS = ("key_conv", "value_conv")
"""Convolutions of keys and of values, each channel its own."""

GATES = ("gate_proj", "g_proj")
"""Products with outputs for each query head: a gate on what attention gives."""

FUSED = {
    "afm7": "qkv_proj", "baichuan_m1": "W_pack", "bailing_moe": "query_key_value",
    "bailing_moe_linear": "query_key_value", "dbrx": "Wqkv", "gpt2": "c_attn", "gpt_bigcode": "c_attn",
    "gpt_neox": "query_key_value", "internlm2": "wqkv", "lille-130m": "qkv_proj", "openelm": "qkv_proj",
    "phi3": "qkv_proj", "phi3small": "query_key_value", "phixtral": "Wqkv", "plamo2": "qkv_proj",
    "plamo3": "qkv_proj", "qwen": "c_attn", "spark2_5": "q_k_v_proj",
}  # fmt: skip
"""mlx-lm's file -> the product that gives queries, keys and values at once; what is not here stays whole."""

BY_GROUP = frozenset({"gpt_neox", "internlm2", "phi3small"})
"""Files where it gives kv-group after kv-group: its queries, its key, its value. Elsewhere all queries come first."""


@dataclass(frozen=True)
class Heads:
    """What an attention is made of, and the rank's share of it.

    Args:
        size: features of a query, and of a key.
        columns: inputs of the output product for each query head.
    """

    queries: int
    keys: int
    size: int
    columns: int
    share: HeadShare
    first: bool


def attention(block: Block) -> None:
    """Queries, keys and values by a product each; keys and values may come from another layer."""
    query, output = _products(block, QUERIES, OUTPUTS)
    key, value = block.one_of(KEYS), block.one_of(VALUES)
    n_heads = _count(block.module, QUERY_COUNTS)
    if n_heads is None:
        width = getattr(block.module, "head_dim", None) or 0
        if not width or block.outputs(query) % width:
            raise Whole("it does not say how many heads it has")
        n_heads = block.outputs(query) // width
    n_keys = _count(block.module, KEY_COUNTS)
    if n_keys is None and key is None:
        raise Whole("it does not say how many keys another layer gives it")
    if n_keys is None:  # as many as queries, unless the keys have fewer rows
        n_keys = max(1, n_heads * block.outputs(key) // block.inputs(output)) if key else n_heads
    heads = _heads(block, n_heads, n_keys, block.outputs(query) // n_heads, block.inputs(output) // n_heads)
    block.rows(query, [scaled(heads.share.queries, heads.size)], "heads")
    for name in (key, value):
        if name is not None:
            block.rows(name, [scaled(heads.share.keys, block.outputs(name) // n_keys)], "kv-groups")
    for name in CONVOLUTIONS:
        if f"{name}.weight" in block.shapes:
            span = scaled(heads.share.keys, block.shapes[f"{name}.weight"][0] // n_keys)
            block.channels(name, [span], "kv-groups")
    _beside(block, heads)
    _finish(block, heads, output)


def reusing_attention(block: Block) -> None:
    """Queries alone, for the keys and values of an earlier layer, whose count the module does not say."""
    query, output = _products(block, QUERIES, OUTPUTS)
    n_heads, n_keys = block.module.n_heads, block.root.args.num_kv_heads
    heads = _heads(block, n_heads, n_keys, block.outputs(query) // n_heads, block.inputs(output) // n_heads)
    block.rows(query, [scaled(heads.share.queries, heads.size)], "heads")
    _beside(block, heads)
    _finish(block, heads, output)


def fused_attention(block: Block) -> None:
    """One product for queries, keys and values, cut part by part."""
    file = type(block.module).__module__.rpartition(".")[2]
    fused = FUSED[file]
    output = block.one_of(OUTPUTS)
    if output is None:
        raise Whole("it has no product at its end")
    n_heads = _count(block.module, QUERY_COUNTS)
    if n_heads is None:
        raise Whole("it does not say how many heads it has")
    columns = block.inputs(output) // n_heads
    n_keys = _count(block.module, KEY_COUNTS) or n_heads
    heads = _heads(block, n_heads, n_keys, columns, columns)
    share, size = heads.share, heads.size
    if block.outputs(fused) != (n_heads + 2 * n_keys) * size:
        raise Whole(f"{fused} does not hold {n_heads} queries and {n_keys} keys and values of {size}")
    if file in BY_GROUP:
        ranges = list(_by_group(share, n_heads // n_keys, size))
    else:
        keys = n_heads * size
        values = keys + n_keys * size
        ranges = [scaled(share.queries, size), scaled(share.keys, size, keys), scaled(share.keys, size, values)]
    block.rows(fused, ranges, "kv-groups")
    block.whole("norm")  # of the input
    if getattr(block.module, "block_sparse", False):
        block.join("", partial(_masked_by_head, heads=heads))
    indices = getattr(block.at(fused), "indices", None)
    if isinstance(indices, list):  # where a product splits what it gives itself
        ends = [share.n_queries * size, (share.n_queries + share.n_keys) * size]
        block.set("indices", ends, at=fused)
    _beside(block, heads)
    _finish(block, heads, output)


def _masked_by_head(module: Any, _: AllReduce, *, heads: Heads) -> None:
    whole = copy.copy(module)
    for names, count in (
        (QUERY_COUNTS, heads.queries), (KEY_COUNTS, heads.keys), (GROUP_COUNTS, heads.queries // heads.keys),
    ):  # fmt: skip
        for name in names:
            if hasattr(whole, name):
                setattr(whole, name, count)
    become(module, MaskedByHead, whole=whole._block_sparse_mask, queries=heads.share.queries)


def _by_group(share: HeadShare, group: int, size: int) -> list[Range]:
    """Rows of a product that gives kv-group after kv-group."""
    found = []
    for key in range(*share.keys):
        start = key * (group + 2) * size
        first = max(share.queries[0], key * group) - key * group
        last = min(share.queries[1], (key + 1) * group) - key * group
        found += [scaled((first, last), size, start), scaled((group, group + 2), size, start)]
    return found


def _products(block: Block, *kinds: tuple[str, ...]) -> list[str]:
    found = [block.one_of(names) for names in kinds]
    if None in found:
        raise Whole("its products are not known")
    return [name for name in found if name]


def _count(module: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)


def _heads(block: Block, n_heads: int, n_keys: int, size: int, columns: int) -> Heads:
    share = block.rank.heads(n_heads, n_keys, columns)
    block.kv_heads = KvShare(*share.keys, n_keys)
    return Heads(n_heads, n_keys, size, columns, share, block.rank.is_first_holder(n_heads, n_keys, columns))


def _beside(block: Block, heads: Heads) -> None:
    """Norms, gates and sinks that attentions have beside their products."""
    share = heads.share
    for name in QUERY_NORMS:
        _norm(block, name, share.queries, heads.queries, heads, counts=True)
    for name in KEY_NORMS:
        _norm(block, name, share.keys, heads.keys, heads, counts=heads.first)
    for name in GATES:
        if f"{name}.weight" in block.shapes:
            if block.outputs(name) % heads.queries:
                raise Whole(f"{name} does not belong to heads")
            block.rows(name, [scaled(share.queries, block.outputs(name) // heads.queries)], "heads")
    if getattr(block.module, "index_n_heads", None) == heads.keys and "index_q_proj.weight" in block.shapes:
        block.rows("index_q_proj", [scaled(share.keys, block.outputs("index_q_proj") // heads.keys)], "kv-groups")
        block.whole("index_k_proj", "index_q_norm", "index_k_norm")
        block.set("index_n_heads", share.n_keys)
    for names, span in ((QUERY_WEIGHTS, share.queries), (KEY_WEIGHTS, share.keys)):
        for name in names:
            if name in block.shapes:
                shape = block.shapes[name]
                total = heads.queries if names is QUERY_WEIGHTS else heads.keys
                if total not in shape:
                    raise Whole(f"{name} does not belong to heads")
                block.array(name, shape.index(total), [span], "heads")
    block.whole(*(name for name in block.shapes if block.shapes[name] == ()))  # one figure for all


def _norm(block: Block, name: str, span: Range, total: int, heads: Heads, *, counts: bool) -> None:
    size = heads.size
    shape = block.shapes.get(f"{name}.weight")
    listed = [path for path in block.shapes if path.startswith(f"{name}.norms.")]
    if listed:  # a norm of its own for each head
        held = {f"{name}.norms.{head}" for head in range(*span)}
        for path in listed:
            (block.whole if path.rpartition(".")[0] in held else block.drop)(path)
        block.keep(f"{name}.norms", span)
    elif shape is None:
        return
    elif len(shape) == 2 and shape[0] == total:  # a row of weights for each head
        block.array(f"{name}.weight", 0, [span], "heads")
    elif shape in ((size,), (heads.columns,)):  # the two differ where a product gives a gate with each query
        block.whole(name)  # over one head at a time
    elif shape == (total * size,) and type(block.at(name)) is nn.RMSNorm:
        block.array(f"{name}.weight", 0, [scaled(span, size)], "heads")
        block.join(name, partial(_spread, width=total * size, counts=counts))
    else:
        raise Whole(f"{name} works on all heads, as a {type(block.at(name)).__name__}")


def _spread(module: Any, all_reduce: AllReduce, *, width: int, counts: bool) -> None:
    become(module, SpreadNorm, all_reduce=all_reduce, width=width, counts=counts)


def _finish(block: Block, heads: Heads, output: str) -> None:
    """The output product, and the counts under whatever names the module asks for them."""
    share = heads.share
    block.columns(output, [scaled(share.queries, heads.columns)], "heads")
    block.join(output, summed)
    for names, before, after in (
        (QUERY_COUNTS, heads.queries, share.n_queries),
        (KEY_COUNTS, heads.keys, share.n_keys),
        (GROUP_COUNTS, heads.queries // heads.keys, share.n_queries // share.n_keys),
        (QUERY_SIZES, heads.queries * heads.columns, share.n_queries * heads.columns),
        (KEY_SIZES, heads.keys * heads.columns, share.n_keys * heads.columns),
    ):
        for name in names:
            if getattr(block.module, name, None) == before:
                block.set(name, after)


def width_of_input(rule: Callable[[Block], None]) -> Callable[[Block], None]:
    """For attentions that take the width of all their queries from their input: `rule`, and a narrower input."""

    def narrowed(block: Block) -> None:
        rule(block)
        output = block.one_of(OUTPUTS)
        assert output is not None
        columns = block.cuts[f"{output}.weight"].size
        block.join("", partial(claim_width, width=columns, products=[n for n in block.products() if n != output]))

    return narrowed


def tiled_attention(block: Block) -> None:
    """PLaMo's: keys and values are laid out once more for each lot of queries, so query i reads key i modulo keys."""
    n_heads, n_keys = block.module.q_num_heads, block.module.k_num_heads
    lots, size, columns = n_heads // n_keys, block.module.qk_dim, block.module.v_dim
    keys = block.rank.units(n_keys, math.lcm(columns, block.rank.head_group) // columns)
    queries = [(lot * n_keys + keys[0], lot * n_keys + keys[1]) for lot in range(lots)]
    block.rows("q_proj", [scaled(span, size) for span in queries], "heads")
    block.rows("k_proj", [scaled(keys, size)], "kv-groups")
    block.rows("v_proj", [scaled(keys, columns)], "kv-groups")
    block.columns("o_proj", [scaled(span, columns) for span in queries], "heads")
    block.join("o_proj", summed)
    block.kv_heads = KvShare(*keys, n_keys)
    count = keys[1] - keys[0]
    for name, value in (("q_num_heads", lots * count), ("k_num_heads", count), ("v_num_heads", count)):
        block.set(name, value)


def loop_gate(block: Block) -> None:
    """IQuest's gates beside the layers, a row and a bias for each query head, cut as the attentions are."""
    config = block.root.args
    share = block.rank.heads(block.module.num_heads, config.num_key_value_heads, block.module.head_dim)
    block.array("weight", 0, [share.queries], "heads")
    block.array("bias", 0, [share.queries], "heads")
    block.set("num_heads", share.n_queries)
