"""The Gemma family: scaled embeddings, soft caps, windows, keys and values shared between layers, per-layer inputs."""

from __future__ import annotations

from typing import Any

from mlxcel_nb.models.catalogue.entry import ADDS_ONE, WINDOW, Entry, pattern, sized

_GEMMA3_TEXT = sized(
    "gemma3_text", head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, sliding_window_pattern=3,
    rope_local_base_freq=1000.0,
)  # fmt: skip

_GEMMA3N: dict[str, Any] = sized(
    "gemma3n_text", head_dim=16, num_hidden_layers=8, num_kv_shared_layers=3, vocab_size_per_layer_input=200,
    sliding_window=WINDOW, rope_local_base_freq=1000.0, final_logit_softcapping=20.0,
    layer_types=pattern("SSFSFSFS"), activation_sparsity_pattern=[0.7, 0.7] + [0.0] * 6,
    hidden_size_per_layer_input=16, altup_num_inputs=3, altup_coef_clip=120.0, altup_correct_scale=True,
    altup_active_idx=0, laurel_rank=8,
)  # fmt: skip

ENTRIES = [
    Entry(
        "gemma",
        sized("gemma", head_dim=24),
        ("embedding times the root of its size", "head size that is not hidden over heads", "tied embeddings"),
        draws=(ADDS_ONE,),
    ),
    Entry(
        "gemma2",
        sized("gemma2", head_dim=16, query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
              final_logit_softcapping=10.0),
        ("soft caps on scores and logits", "norms around the blocks", "scaled embedding", "tied embeddings"),
        draws=(ADDS_ONE,),
    ),
    Entry(
        "gemma3_text",
        _GEMMA3_TEXT,
        ("sliding and full attention, each with its own rope", "norms of q and k per head", "scaled embedding"),
        draws=(ADDS_ONE,),
    ),
    Entry(
        "gemma3",
        {"model_type": "gemma3", "vocab_size": 257, "text_config": _GEMMA3_TEXT},
        ("a wrapper around gemma3_text",),
        draws=(ADDS_ONE,),
    ),
    Entry(
        "gemma3n",
        {"model_type": "gemma3n", "text_config": _GEMMA3N},
        ("keys and values shared by the last layers", "per-layer inputs", "several residual streams",
         "sparse activations", "soft cap on logits"),
        note="the last 3 of 8 layers read the caches of layers 3 and 4; 5 caches for 8 layers",
        needs_cache=True,
    ),
]  # fmt: skip
