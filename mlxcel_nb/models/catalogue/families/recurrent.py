"""Decoders without attention: state-space models and RWKV."""

from __future__ import annotations

from mlxcel_nb.models.catalogue.entry import LAYERS, Entry

ENTRIES = [
    Entry(
        "mamba",
        {"model_type": "mamba", "vocab_size": 257, "hidden_size": 128, "intermediate_size": 192, "state_size": 8,
         "num_hidden_layers": LAYERS, "conv_kernel": 4, "use_bias": True, "use_conv_bias": True, "time_step_rank": 8,
         "tie_word_embeddings": True},
        ("selective state space, every channel its own", "causal convolution", "tied embeddings"),
        note="channels are cut; step size, B and C are sums over all channels and need one more all-reduce",
    ),
    Entry(
        "mamba2",
        {"model_type": "mamba2", "num_heads": 12, "head_dim": 16, "vocab_size": 257, "hidden_size": 128,
         "intermediate_size": 192, "state_size": 16, "num_hidden_layers": LAYERS, "layer_norm_epsilon": 1e-5,
         "conv_kernel": 4, "n_groups": 4, "use_bias": True, "use_conv_bias": True, "tie_word_embeddings": False,
         "time_step_limit": [0.0, float("inf")], "time_step_rank": "auto"},
        ("state space by heads", "4 groups of B and C", "causal convolution", "a gated norm over all heads"),
        note="cut by groups; the gated norm needs the sum of squares over all ranks",
    ),
    Entry(
        "rwkv7",
        {"model_type": "rwkv7", "vocab_size": 257, "hidden_size": 128, "intermediate_size": 192, "norm_eps": 1e-5,
         "head_dim": 16, "num_hidden_layers": LAYERS, "a_low_rank_dim": 8, "v_low_rank_dim": 8,
         "gate_low_rank_dim": 16, "decay_low_rank_dim": 8, "tie_word_embeddings": False},
        ("delta rule state by heads", "token shift", "values of layer 0 in every layer"),
        note="later layers read the values that layer 0 made: they travel between stages",
        draws=((r"\.x_[rwkvag]$", 0.5, 0.2), (r"\.k_[ka]$", 1.0, 0.1), (r"\.g_norm\.weight$", 1.0, 0.1)),
    ),
]  # fmt: skip
