"""The older decoders: learned positions, fused qkv in several orders, attention beside the feed-forward."""

from __future__ import annotations

from mlxcel_nb.models.catalogue.entry import LAYERS, Entry, sized

ENTRIES = [
    Entry(
        "gpt2",
        {"model_type": "gpt2", "n_ctx": 256, "n_embd": 128, "n_head": 8, "n_layer": LAYERS, "n_positions": 256,
         "layer_norm_epsilon": 1e-5, "vocab_size": 257},
        ("learned positions", "fused qkv", "no grouped queries", "layer norms with bias", "tied embeddings"),
        note="positions come from the cache's offset, also on a stage that has no embedding",
    ),
    Entry(
        "gpt_neox",
        sized("gpt_neox", "num_key_value_heads",  layer_norm_eps=1e-5, rotary_emb_base=10000, rotary_pct=0.5,
              use_parallel_residual=True),
        ("qkv fused by head", "attention beside feed-forward", "partial rotary", "biases everywhere"),
    ),
    Entry(
        "gpt_bigcode",
        {"model_type": "gpt_bigcode", "n_embd": 128, "n_layer": LAYERS, "n_inner": 192, "n_head": 8,
         "n_positions": 256, "layer_norm_epsilon": 1e-5, "vocab_size": 257, "multi_query": True},
        ("learned positions", "fused qkv with one kv-head", "biases everywhere", "tied embeddings"),
        note="one kv-head: every rank keeps it whole",
    ),
    Entry(
        "gptj",
        {"model_type": "gptj", "n_embd": 128, "vocab_size": 257, "layer_norm_epsilon": 1e-5, "n_positions": 256,
         "n_head": 8, "rotary_dim": 8, "n_layer": LAYERS},
        ("attention beside feed-forward", "partial rotary, interleaved", "a head with bias"),
    ),
    Entry(
        "phi",
        sized("phi", num_key_value_heads=4, partial_rotary_factor=0.5, layer_norm_eps=1e-5),
        ("attention beside feed-forward", "partial rotary", "a head with bias", "grouped queries"),
    ),
    Entry(
        "phi3small",
        sized("phi3small", "intermediate_size",  ff_intermediate_size=192, dense_attention_every_n_layers=2,
              gegelu_limit=20.0, layer_norm_epsilon=1e-5, mup_embedding_multiplier=3.0, mup_width_multiplier=2.0,
              blocksparse_block_size=32, blocksparse_num_local_blocks=1, blocksparse_vert_stride=3, vocab_size=100360),
        ("block-sparse attention in every second layer, by head", "qkv fused by kv-group", "interleaved gate and up",
         "tied embeddings", "tokens that are never given"),
        note="the vocabulary has its published size: the forbidden tokens lie at its end",
        drifts="its block-sparse layers add a mask of truth values, so the tokens of a prompt see later ones",
    ),
    Entry(
        "phixtral",
        {"model_type": "phixtral", "num_vocab": 257, "vocab_size": 257, "model_dim": 128, "num_heads": 8,
         "num_layers": LAYERS, "rotary_dim": 8, "num_experts_per_tok": 2, "num_local_experts": 4},
        ("4 experts with biases, 2 a token", "attention beside experts", "fused qkv", "a head with its own norm"),
        note="the final norm is part of the head",
    ),
]  # fmt: skip
