"""Multi-head latent attention: queries and keys through a low rank, one compressed key for all heads in the cache."""

from __future__ import annotations

from typing import Any

from mlxcel_nb.models.catalogue.entry import Entry, sized

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
        sized("deepseek_v3", **LATENT, **ROUTED, n_shared_experts=1, first_k_dense_replace=2, n_group=4, topk_group=2,
              routed_scaling_factor=2.0, rope_scaling=YARN),
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
]  # fmt: skip
