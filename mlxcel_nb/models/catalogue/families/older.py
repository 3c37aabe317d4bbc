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
        sized("gpt_neox", num_key_value_heads=None, layer_norm_eps=1e-5, rotary_emb_base=10000, rotary_pct=0.5,
              use_parallel_residual=True),
        ("qkv fused by head", "attention beside feed-forward", "partial rotary", "biases everywhere"),
    ),
]  # fmt: skip
