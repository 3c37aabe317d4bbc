"""Linear attention: each head keeps a matrix of its own and updates it token by token. For the MLX thread.

Heads are cut as in attention, with whatever belongs to them: convolutions of q, k and v, decays, gates, norms.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mlxcel_nb.models.sharding.attention import KEY_NORMS, QUERY_NORMS
from mlxcel_nb.models.sharding.block import Block, Whole
from mlxcel_nb.models.sharding.standins import AllReduce, scattered, sliced, summed
from mlxcel_nb.plan.cuts import scaled


def gated_delta(block: Block) -> None:
    """Gated delta rule, value heads over fewer key heads: Qwen3-Next, Qwen3.5, OLMo hybrid."""
    module = block.module
    n_values, n_keys = module.num_v_heads, module.num_k_heads
    key, value = module.head_k_dim, module.head_v_dim
    output = "out_proj" if "out_proj" in module else "o_proj"
    share = block.rank.heads(n_values, n_keys, value, block.group(output))
    keys, values = scaled(share.keys, key), scaled(share.queries, value)
    inner = [keys, scaled(keys, 1, n_keys * key), scaled(values, 1, 2 * n_keys * key)]
    if "in_proj_qkvz" in module:
        _by_key_head(block, share.queries, share.keys)
    elif "in_proj_qkv" in module:
        block.rows("in_proj_qkv", inner, "kv-groups")
    for name, span in {
        "q_proj": keys, "k_proj": keys, "v_proj": values, "in_proj_z": values, "g_proj": values,
        "in_proj_a": share.queries, "in_proj_b": share.queries, "a_proj": share.queries, "b_proj": share.queries,
    }.items():  # fmt: skip
        if name in module:
            block.rows(name, [span], "kv-groups" if name in ("q_proj", "k_proj") else "heads")
    convolutions = {"conv1d": inner, "q_conv1d": [keys], "k_conv1d": [keys], "v_conv1d": [values]}
    found = [(name, ranges) for name, ranges in convolutions.items() if name in module]
    for number, (name, ranges) in enumerate(found):
        block.state(number, 2, ranges, block.shapes[f"{name}.weight"][0])
        block.channels(name, ranges, "kv-groups")
    block.state(len(found), 1, [share.queries], n_values)
    for name in ("A_log", "dt_bias"):
        block.array(name, 0, [share.queries], "heads")
    block.whole("norm", "o_norm")  # over one head at a time
    block.columns(output, [values], "heads")
    block.join(output, summed)
    block.set("num_v_heads", share.n_queries)
    block.set("num_k_heads", share.n_keys)
    block.set("key_dim", share.n_keys * key)
    block.set("value_dim", share.n_queries * value)
    if hasattr(module, "conv_dim"):
        block.set("conv_dim", 2 * share.n_keys * key + share.n_queries * value)


def _by_key_head(block: Block, values: tuple[int, int], keys: tuple[int, int]) -> None:
    """Products that give, key head after key head, its query, its key, its values and their gates."""
    module = block.module
    key, value, per = module.head_k_dim, module.head_v_dim, module.num_v_heads // module.num_k_heads
    wide, narrow = [], []
    for head in range(*keys):
        span = (max(values[0], head * per) - head * per, min(values[1], (head + 1) * per) - head * per)
        start = head * 2 * (key + per * value)
        wide += [(start, start + 2 * key), scaled(span, value, start + 2 * key)]
        wide.append(scaled(span, value, start + 2 * key + per * value))
        narrow += [scaled(span, 1, 2 * head * per), scaled(span, 1, (2 * head + 1) * per)]
    block.rows("in_proj_qkvz", wide, "kv-groups")
    block.rows("in_proj_ba", narrow, "kv-groups")


def channel_gated_delta(block: Block) -> None:
    """Delta rule with a gate for each channel: Kimi's and Ling's."""
    module = block.module
    heads, size = module.num_heads, module.head_dim
    share = block.rank.heads(heads, heads, size, block.group("o_proj"))
    span = scaled(share.queries, size)
    fused = [scaled(span, 1, part * heads * size) for part in range(3)]
    for name in ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj", "f_b_proj", "g_b_proj"):
        if name in module:
            block.rows(name, [span], "heads")
    separate = ("q_conv.conv", "k_conv.conv", "v_conv.conv", "q_conv1d", "k_conv1d", "v_conv1d")
    convolutions = {name: [span] for name in separate if f"{name}.weight" in block.shapes}
    if "qkv_proj" in module:
        block.rows("qkv_proj", fused, "heads")
        convolutions["qkv_conv.conv"] = fused
    for number, (name, ranges) in enumerate(convolutions.items()):
        block.state(number, 2, ranges, block.shapes[f"{name}.weight"][0])
        block.channels(name, ranges)
    block.state(len(convolutions), 1, [share.queries], heads)
    block.rows("b_proj", [share.queries], "heads")
    block.array("A_log", block.shapes["A_log"].index(heads), [share.queries], "heads")
    block.array("dt_bias", 0, [span], "heads")
    block.whole("f_a_proj", "g_a_proj", "o_norm")
    block.columns("o_proj", [span], "heads")
    block.join("o_proj", summed)
    block.set("num_heads", share.n_queries)
    for name in ("projection_dim", "projection_size"):
        if hasattr(module, name):
            block.set(name, share.n_queries * size)
    if hasattr(module, "_decode_core"):
        block.join("", _uncompiled)


def _uncompiled(module: Any, _: AllReduce) -> None:
    """A step that waits for other ranks is not one graph."""
    module._step = module._decode_core


def decayed(block: Block) -> None:
    """Linear attention with a decay for each head and a norm by groups of heads: Ling's and Ring's."""
    module = block.module
    heads, size, groups = module.num_attention_heads, module.head_dim, module.g_norm.groups
    if module.num_key_value_heads != heads or heads % groups:
        raise Whole("its heads do not fall into groups")
    share = block.rank.heads(heads, heads, size, block.rank.common([block.group("dense"), heads // groups * size]))
    span = scaled(share.queries, size)
    block.rows("query_key_value", [scaled(span, 1, part * heads * size) for part in range(3)], "heads")
    block.rows("g_proj", [span], "heads")
    block.array("g_norm.weight", 0, [span], "heads")
    block.whole(*QUERY_NORMS, *KEY_NORMS)
    block.columns("dense", [span], "heads")
    block.join("dense", summed)
    block.keep("_slope", share.queries)
    block.set("groups", share.n_queries * groups // heads, at="g_norm")
    block.set("num_attention_heads", share.n_queries)
    block.set("num_key_value_heads", share.n_queries)
    block.state(0, 1, [share.queries], heads)


def time_mixing(block: Block) -> None:
    """RWKV-7's. Its code takes the width of what it makes from its input, so a rank's heads lie among empty ones."""
    heads, size = block.module.num_heads, block.module.head_dim
    share = block.rank.heads(heads, heads, size, block.group("o_proj"))
    span = scaled(share.queries, size)
    loras = [name for name in ("w_lora", "a_lora", "v_lora", "g_lora") if f"{name}.lora.2.weight" in block.shapes]
    for name in ("r_proj", "k_proj", "v_proj", *(f"{lora}.lora.2" for lora in loras)):
        block.rows(name, [span], "heads")
        block.join(name, partial(scattered, place=(*span, heads * size)))
    block.whole(*(f"{lora}.lora.0" for lora in loras))
    block.whole(*(f"x_{letter}" for letter in "rwkvag"), "k_k", "k_a", "r_k", "g_norm")
    block.columns("o_proj", [span], "heads")
    block.join("o_proj", partial(sliced, span=span))
    block.state(1, 1, [share.queries], heads, in_place=True)
