"""Multi-head latent attention: queries and keys through a low rank, one compressed key for all heads in the cache."""

from __future__ import annotations

from typing import Any

from mlxcel_nb.models.catalogue.entry import WINDOW, Entry, sized

LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 8,
}
"""Head sizes of which no two are the same."""

ROUTED: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}

YARN: dict[str, Any] = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip

CACHE = "the cache holds one latent for all heads: every tensor rank keeps all of it"

_DEEPSEEK_V3 = sized(
    "deepseek_v3", **LATENT, **ROUTED, n_shared_experts=1, first_k_dense_replace=2, n_group=4, topk_group=2,
    routed_scaling_factor=2.0, rope_scaling=YARN,
)  # fmt: skip

_DEEPSEEK_V32 = {
    **_DEEPSEEK_V3, "model_type": "deepseek_v32", "index_n_heads": 8, "index_head_dim": 16, "index_topk": 6,
}  # fmt: skip

_MILD = ((r"q_b_proj\.weight$", 0.0, 0.07),)
"""Queries that are scaled up once more are drawn smaller, lest attention be a choice of one key."""

_LONGCAT: dict[str, Any] = {
    **LATENT, "hidden_size": 128, "ffn_hidden_size": 192, "moe_topk": 3, "expert_ffn_hidden_size": 96,
    "n_routed_experts": 8, "zero_expert_num": 4, "zero_expert_type": "identity", "num_layers": 5, "vocab_size": 257,
    "max_position_embeddings": 512, "num_attention_heads": 8, "routed_scaling_factor": 1.5, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "attention_bias": False,
}  # fmt: skip

ENTRIES = [
    Entry(
        "deepseek_v2",
        sized("deepseek_v2", **LATENT, **ROUTED, n_shared_experts=2, first_k_dense_replace=2, topk_method="greedy",
              routed_scaling_factor=1.5, rope_scaling=YARN),
        ("latent attention, unpacked in the cache", "8 experts, 3 a token", "2 shared experts", "2 dense layers first",
         "yarn"),
    ),
    Entry(
        "deepseek_v3",
        _DEEPSEEK_V3,
        ("latent attention, absorbed", "8 experts in 4 groups, 3 a token", "a shared expert", "2 dense layers first",
         "biased routing", "yarn"),
        note=CACHE,
    ),
    Entry(
        "minicpm3",
        sized("minicpm3", **{**LATENT, "v_head_dim": 16}, dim_model_base=64, scale_depth=1.4, scale_emb=6.0,
              rope_scaling={"type": "longrope", "original_max_position_embeddings": 64,
                            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}),
        ("latent attention, unpacked in the cache", "longrope", "scaled embedding, residual and logits"),
    ),
    Entry(
        "deepseek_v32",
        _DEEPSEEK_V32,
        ("latent attention to keys that an indexer chooses", "8 experts in 4 groups, 3 a token", "a shared expert",
         "2 dense layers first", "a pair of caches a layer"),
        note=CACHE + ", and the indexer's keys",
    ),
    Entry(
        "glm_moe_dsa",
        {**_DEEPSEEK_V32, "model_type": "glm_moe_dsa", "topk_method": "noaux_tc", "scoring_func": "sigmoid",
         "norm_topk_prob": True, "moe_layer_freq": 1, "attention_bias": False,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        ("deepseek_v32 with interleaved rope in the indexer",),
        note=CACHE + ", and the indexer's keys",
    ),
    Entry(
        "deepseek_v41",
        {**sized("deepseek_v41", "num_key_value_heads", "intermediate_size", **ROUTED, head_dim=24,
                 q_lora_rank=48, qk_rope_head_dim=8, o_groups=4, o_lora_rank=16, routed_scaling_factor=1.5,
                 swiglu_limit=3.0, sliding_window=WINDOW, compress_rope_theta=20000.0, candidate_source_layer_id=1,
                 candidate_topk_blocks=3, candidate_block_size=2, index_n_heads=8, index_head_dim=24, index_topk=4,
                 hc_mult=3, hc_sinkhorn_iters=4),
         "compress_ratios": [0, 2, 2, 2, 2, 0, 2], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 2, 3]},
        ("one key for all heads, windowed and compressed", "compressed keys and choices shared between layers",
         "3 residual streams", "output projection by groups of heads", "8 experts, 3 a token", "a shared expert",
         "attention sinks"),
        note="cut by the 4 output groups; streams, chosen keys and compressed keys travel between stages",
    ),
    Entry(
        "glm4_moe_lite",
        sized("glm4_moe_lite", **LATENT, **ROUTED, n_shared_experts=1, first_k_dense_replace=2, n_group=4,
              topk_group=2, routed_scaling_factor=1.8, tie_word_embeddings=False, num_nextn_predict_layers=0),
        ("latent attention, absorbed", "8 experts in 4 groups, 3 a token", "a shared expert", "2 dense layers first"),
        note=CACHE,
    ),
    Entry(
        "kimi_k25",
        {"model_type": "kimi_k25", "text_config": _DEEPSEEK_V3},
        ("a wrapper around deepseek_v3",),
        note=CACHE,
    ),
    Entry(
        "kimi_vl",
        {"model_type": "kimi_vl", "text_config": _DEEPSEEK_V3},
        ("a wrapper around deepseek_v3",),
        note=CACHE,
    ),
    Entry(
        "longcat_flash",
        {**_LONGCAT, "model_type": "longcat_flash", "attention_method": "MLA", "router_bias": True},
        ("two latent attentions and two feed-forwards a layer, experts beside them", "8 experts, 4 that do nothing",
         "a pair of caches a layer"),
        note=CACHE,
        draws=_MILD,
    ),
    Entry(
        "longcat_flash_ngram",
        {**_LONGCAT, "model_type": "longcat_flash_ngram", "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3,
         "emb_split_num": 2},
        ("embeddings of pairs and triples of tokens", "a cache of tokens before those of the layers",
         "two latent attentions a layer"),
        note="one cache more than layers; " + CACHE,
        draws=_MILD,
    ),
    Entry(
        "mistral4",
        sized("mistral4", **LATENT, **ROUTED, n_shared_experts=1, first_k_dense_replace=2, n_group=4, topk_group=2,
              routed_scaling_factor=1.5, norm_topk_prob=True, tie_word_embeddings=False, rope_interleave=True,
              rope_parameters={**YARN, "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1}),
        ("latent attention, absorbed", "queries scaled by position", "8 experts in 4 groups, 3 a token",
         "a shared expert", "2 dense layers first"),
        note=CACHE,
    ),
    Entry(
        "youtu_llm",
        sized("youtu_llm", **LATENT, attention_bias=False, mlp_bias=False, tie_word_embeddings=True),
        ("latent attention, absorbed", "dense feed-forward", "tied embeddings"),
        note=CACHE,
    ),
]  # fmt: skip
