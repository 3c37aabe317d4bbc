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

_GEMMA4_TEXT = sized(
    "gemma4_text", num_hidden_layers=8, head_dim=16, global_head_dim=32, vocab_size_per_layer_input=257,
    num_kv_shared_layers=3, num_key_value_heads=2, num_global_key_value_heads=2, hidden_size_per_layer_input=16,
    sliding_window=WINDOW, layer_types=pattern("SSFSFSSF"), final_logit_softcapping=20.0, tie_word_embeddings=True,
    use_double_wide_mlp=True, attention_k_eq_v=False,
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
        ("sliding and full attention, each with its own rope", "norms of q and k per head", "scaled embedding",
         "tied embeddings where the files have no head"),
        absent=("lm_head.weight",),
        draws=(ADDS_ONE,),
    ),
    Entry(
        "gemma3",
        {"model_type": "gemma3", "vocab_size": 257, "text_config": _GEMMA3_TEXT},
        ("a wrapper around gemma3_text", "a head of its own"),
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
    Entry(
        "gemma4_text",
        _GEMMA4_TEXT,
        ("keys and values shared by the last layers", "per-layer inputs", "two head sizes", "partial rotary",
         "wider feed-forward in shared layers", "soft cap on logits"),
        note="the last 3 of 8 layers use the keys and values of layers 3 and 4; 5 caches for 8 layers; 2 kv-heads",
        draws=((r"layer_scalar$", 1.0, 0.1),),
    ),
    Entry(
        "gemma4",
        {"model_type": "gemma4", "vocab_size": 257,
         "text_config": {**_GEMMA4_TEXT, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
                         "attention_k_eq_v": True, "num_key_value_heads": 4, "enable_moe_block": True,
                         "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 96}},
        ("a wrapper around gemma4_text", "values that are keys in full layers", "8 experts beside a feed-forward",
         "two head sizes and kv-head counts"),
        note="full layers have 2 kv-heads, sliding ones 4",
        draws=((r"layer_scalar$|per_expert_scale$|router\.scale$", 1.0, 0.1),),
    ),
    Entry(
        "gear",
        sized("gear", head_dim=16, layer_types=pattern("CSFCSFC", C="conv_mixer"), sliding_window=WINDOW,
              conv_L_cache=3, attn_logit_softcapping=5.0, final_logit_softcapping=20.0, tie_word_embeddings=True),
        ("convolved mixers, sliding and full attention", "soft caps on scores and logits", "scaled embedding",
         "norms around the blocks"),
        draws=(ADDS_ONE,),
    ),
]  # fmt: skip
