"""Decoders in the manner of Llama: rotary positions, grouped queries, a gated feed-forward in every layer."""

from __future__ import annotations

from mlxcel_nb.models.catalogue.entry import LAYERS, WINDOW, Entry, pattern, sized

ENTRIES = [
    Entry(
        "llama",
        sized(
            "llama", tie_word_embeddings=False, sliding_window=WINDOW, layer_types=pattern("FSSFSSF"),
            rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64},
        ),
        ("grouped queries", "sliding and full attention", "llama3 rope scaling", "untied head"),
    ),
    Entry(
        "qwen2",
        sized("qwen2", tie_word_embeddings=True),
        ("grouped queries", "biases on q, k and v", "tied embeddings"),
    ),
    Entry(
        "qwen3",
        sized("qwen3", head_dim=24, tie_word_embeddings=True),
        ("grouped queries", "norms of q and k per head", "head size that is not hidden over heads", "tied embeddings"),
    ),
    Entry(
        "olmo2",
        sized("olmo2", num_key_value_heads=4, tie_word_embeddings=False),
        ("grouped queries", "norms of q and k over all heads", "norms after attention and feed-forward"),
        note="the norms of q and k need the sum of squares over all ranks",
    ),
    Entry(
        "olmo3",
        sized("olmo3", sliding_window=WINDOW, layer_types=pattern("SSFSSFS")),
        ("norms of q and k over all heads", "sliding and full attention", "norms after the blocks"),
        note="the norms of q and k need the sum of squares over all ranks",
    ),
    Entry(
        "phi3",
        sized(
            "phi3", partial_rotary_factor=0.75, original_max_position_embeddings=64,
            rope_scaling={"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0 + i for i in range(6)]},
        ),
        ("fused qkv", "fused gate and up", "partial rotary", "longrope"),
    ),
    Entry(
        "starcoder2",
        sized("starcoder2", norm_epsilon=1e-5, tie_word_embeddings=True),
        ("layer norms with bias", "feed-forward without gate", "biases everywhere", "tied embeddings"),
    ),
    Entry(
        "cohere",
        sized("cohere", layer_norm_eps=1e-5, logit_scale=0.5, use_qk_norm=True),
        ("attention beside feed-forward", "a norm of each head's own", "scaled logits", "tied embeddings"),
        note="the weights of the norms of q and k are cut by heads",
    ),
    Entry(
        "cohere2",
        sized("cohere2", head_dim=16, layer_norm_eps=1e-5, logit_scale=0.5, sliding_window=WINDOW,
              sliding_window_pattern=3),
        ("attention beside feed-forward", "sliding attention with rope, full without", "scaled logits"),
    ),
    Entry(
        "glm4",
        sized("glm4", head_dim=16, attention_bias=True, partial_rotary_factor=0.5),
        ("fused gate and up", "partial rotary, interleaved", "biases on q, k and v", "norms around the blocks"),
    ),
    Entry(
        "smollm3",
        sized("smollm3", tie_word_embeddings=True, no_rope_layer_interval=3),
        ("every third layer without rope", "tied embeddings"),
    ),
    Entry(
        "granite",
        sized("granite", logits_scaling=2.0, attention_multiplier=0.2, embedding_multiplier=6.0,
              residual_multiplier=0.5, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        ("multipliers of embedding, attention, residual and logits", "biases everywhere", "tied embeddings"),
    ),
    Entry(
        "minicpm",
        sized("minicpm", dim_model_base=64, scale_depth=1.4, scale_emb=6.0, tie_word_embeddings=False),
        ("scaled embedding, residual and logits", f"a residual scale that counts all {LAYERS} layers"),
    ),
]  # fmt: skip
