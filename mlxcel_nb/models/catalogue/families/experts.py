"""Mixtures of experts: routed, shared, dense layers among them, windows and sinks."""

from __future__ import annotations

from mlxcel_nb.models.catalogue.entry import EXPERTS, WINDOW, Entry, pattern, sized

ENTRIES = [
    Entry(
        "mixtral",
        sized("mixtral", num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=False),
        ("8 experts, 2 a token", "grouped queries"),
    ),
    Entry(
        "qwen2_moe",
        sized("qwen2_moe", **EXPERTS, shared_expert_intermediate_size=160),
        ("8 experts, 3 a token", "a gated shared expert", "biases on q, k and v"),
    ),
    Entry(
        "qwen3_moe",
        sized("qwen3_moe", **EXPERTS, head_dim=24, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=True,
              tie_word_embeddings=False),
        ("8 experts, 3 a token", "dense layers among the sparse", "norms of q and k per head"),
    ),
    Entry(
        "gpt_oss",
        sized("gpt_oss", num_local_experts=8, num_experts_per_tok=3, head_dim=16, sliding_window=WINDOW,
              layer_types=pattern("SFSFSFS")),
        ("8 experts with biases, 3 a token", "sliding and full attention", "attention sinks", "biases everywhere"),
        note="sinks are cut by heads; a bias of an expert's last product is added once",
    ),
    Entry(
        "olmoe",
        sized("olmoe", num_experts=8, num_experts_per_tok=3, intermediate_size=96, norm_topk_prob=False,
              tie_word_embeddings=False),
        ("8 experts, 3 a token", "norms of q and k over all heads"),
        note="the norms of q and k need the sum of squares over all ranks",
    ),
    Entry(
        "phimoe",
        sized("phimoe", num_local_experts=8, num_experts_per_tok=2, original_max_position_embeddings=64,
              rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)],
                            "short_mscale": 1.1, "long_mscale": 1.2}),
        ("8 experts, 2 a token", "longrope", "layer norms with bias", "biases on attention and head"),
    ),
]  # fmt: skip
