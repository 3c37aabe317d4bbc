"""Attention and recurrent layers in one stack: state space, delta rule, short convolutions, linear recurrences."""

from __future__ import annotations

from typing import Any

from mlxcel_nb.models.catalogue.entry import ADDS_ONE, EXPERTS, LAYERS, WINDOW, Entry, pattern, sized
from mlxcel_nb.models.catalogue.families.latent import CACHE, LATENT

DELTA: dict[str, Any] = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}

_LFM2 = sized(
    "lfm2", norm_eps=1e-5, conv_bias=True, conv_L_cache=3, block_dim=128, block_multiple_of=32,
    block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, block_ff_dim=192, full_attn_idxs=[2, 4, 6],
)  # fmt: skip

_QWEN3_5 = sized(  # eps: heads whose output is almost nothing are not to make much of the last bits
    "qwen3_5_text", **DELTA, rms_norm_eps=1e-3, head_dim=16, full_attention_interval=3, tie_word_embeddings=True,
    rope_parameters={"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0,
                     "partial_rotary_factor": 0.5},
)  # fmt: skip

_KIMI_DELTA: dict[str, Any] = {
    "kda_layers": [1, 2, 4, 5, 7], "num_heads": 8, "head_dim": 16, "short_conv_kernel_size": 4,
}  # fmt: skip
"""Layers count from one there."""

_KIMI: dict[str, Any] = {
    **LATENT, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1, "moe_intermediate_size": 96,
    "first_k_dense_replace": 2, "num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
    "tie_word_embeddings": False,
}  # fmt: skip

_BAILING: dict[str, Any] = {
    **EXPERTS, "num_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "layer_group_size": 3, "routed_scaling_factor": 1.5, "moe_shared_expert_intermediate_size": 96, "head_dim": 16,
}  # fmt: skip

_GENTLE_RESIDUALS = ((r"res_proj\.weight$", 0.0, 0.04),)
"""Layers of kimi_k3 choose among whole residual streams. At the usual 0.09 the choice is so sharp that rounding grows
to 6e-5 in one process (against float64) and to 1.5e-4 between two orders of summing; here to 4e-5 and 5e-5."""

ENTRIES = [
    Entry(
        "jamba",
        sized("jamba", attn_layer_offset=1, attn_layer_period=3, expert_layer_offset=1, expert_layer_period=2,
              mamba_d_conv=4, mamba_d_state=8, mamba_expand=2, num_experts=8, num_experts_per_tok=2,
              tie_word_embeddings=False),
        ("attention in every third layer, without rope", "selective state space", "experts in every second layer"),
        note="state-space channels are cut; step size, B and C are sums over all channels",
    ),
    Entry(
        "falcon_h1",
        sized("falcon_h1", head_dim=16, mamba_d_ssm=192, mamba_n_heads=12, mamba_d_head=16, mamba_n_groups=4,
              mamba_d_state=16, mamba_d_conv=4, mamba_rms_norm=True, mamba_norm_before_gate=False,
              tie_word_embeddings=True, embedding_multiplier=2.0, lm_head_multiplier=1.0),
        ("attention and state space side by side in each layer", "a pair of caches a layer", "multipliers",
         "tied embeddings"),
        note="the gated norm needs the sum of squares over all ranks",
    ),
    Entry(
        "qwen3_next",
        sized("qwen3_next", **DELTA, **EXPERTS, decoder_sparse_step=1, shared_expert_intermediate_size=160,
              mlp_only_layers=[2], partial_rotary_factor=0.5, head_dim=16, norm_topk_prob=True,
              full_attention_interval=3),
        ("gated delta rule, full attention in every third layer", "gated attention", "8 experts, 3 a token",
         "a gated shared expert", "a dense layer", "partial rotary"),
        note="linear attention is cut by its 4 key heads",
    ),
    Entry(
        "granitemoehybrid",
        sized("granitemoehybrid", attention_bias=False, embedding_multiplier=6.0, attention_multiplier=0.2,
              logits_scaling=2.0, residual_multiplier=0.5, layer_types=pattern("MAMMAMM", M="mamba", A="attention"),
              intermediate_size=96, num_local_experts=8, num_experts_per_tok=3, shared_intermediate_size=160,
              mamba_n_heads=12, mamba_d_head=16, mamba_proj_bias=False, mamba_d_state=16, mamba_d_conv=4,
              mamba_n_groups=4, mamba_conv_bias=True, position_embedding_type="nope", tie_word_embeddings=True),
        ("state space and attention, without rope", "8 experts, 3 a token", "a shared feed-forward", "multipliers",
         "tied embeddings"),
        note="the gated norm needs the sum of squares over all ranks",
    ),
    Entry(
        "nemotron_h",
        sized("nemotron_h", num_hidden_layers=9, hybrid_override_pattern=list("ME*-MEM*E"), head_dim=16,
              attention_bias=False, mamba_num_heads=12, mamba_head_dim=16, mamba_proj_bias=False, ssm_state_size=16,
              conv_kernel=4, n_groups=4, mlp_bias=False, layer_norm_epsilon=1e-5, use_bias=False, use_conv_bias=True,
              moe_intermediate_size=96, moe_shared_expert_intermediate_size=160, moe_latent_size=64, n_group=2,
              topk_group=1, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=3, norm_topk_prob=True,
              routed_scaling_factor=1.5),
        ("layers that are either state space, attention, feed-forward or experts", "caches for some layers only",
         "experts in a latent space", "squared ReLU", "a gated norm by groups"),
        note="layers without a state have no cache: caches are counted by those that have",
    ),
    Entry(
        "lfm2",
        _LFM2,
        ("gated short convolutions and attention", "norms of q and k per head", "tied embeddings"),
    ),
    Entry(
        "recurrent_gemma",
        sized("recurrent_gemma", attention_bias=False, conv1d_width=4, num_key_value_heads=1, intermediate_size=384,
              logits_soft_cap=20.0, attention_window_size=WINDOW, num_hidden_layers=LAYERS + 1,
              block_types=["recurrent", "recurrent", "attention"]),
        ("gated linear recurrence by blocks", "sliding attention with one kv-head", "soft cap on logits",
         "scaled embedding", "tied embeddings"),
        note="one kv-head: every rank keeps it whole",
        absent=("lm_head.weight",),
        draws=(ADDS_ONE, (r"recurrent_param$", -1.0, 0.5), (r"gate_weight$", 0.0, 0.25)),
    ),
    Entry(
        "lfm2-vl",
        {"model_type": "lfm2-vl", "text_config": _LFM2},
        ("a wrapper around lfm2",),
    ),
    Entry(
        "lfm2_moe",
        sized("lfm2_moe", **EXPERTS, norm_topk_prob=True, use_expert_bias=True, num_dense_layers=2, norm_eps=1e-5,
              conv_bias=True, conv_L_cache=3, routed_scaling_factor=1.5, full_attn_idxs=[2, 4, 6]),
        ("gated short convolutions and attention", "8 experts, 3 a token", "2 dense layers first", "tied embeddings"),
    ),
    Entry(
        "qwen3_5",
        {"model_type": "qwen3_5", "text_config": _QWEN3_5},
        ("gated delta rule, full attention in every third layer", "gated attention", "partial rotary",
         "tied embeddings"),
        note="linear attention is cut by its 4 key heads",
    ),
    Entry(
        "qwen3_5_moe",
        {"model_type": "qwen3_5_moe",
         "text_config": {**_QWEN3_5, **EXPERTS, "model_type": "qwen3_5_moe_text", "tie_word_embeddings": False,
                         "shared_expert_intermediate_size": 160}},
        ("gated delta rule, full attention in every third layer", "8 experts, 3 a token", "a gated shared expert"),
        note="linear attention is cut by its 4 key heads",
    ),
    Entry(
        "prism_hadamard_qwen35",
        {"model_type": "prism_hadamard_qwen35", "schema_version": 1, "tensor_namespace": "mlx-lm-text",
         "gdn_activation_layout": "grouped", "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
         "modules": [{"path": f"model.layers.{layer}.mlp.down_proj", "embedding": False, "dtype": "float16",
                      "block": 512} for layer in (0, 2, 5)]
         + [{"path": f"model.layers.{layer}.mlp.up_proj", "embedding": False, "dtype": "float16", "block": 0}
            for layer in (1, 5)],
         "text_config": {**_QWEN3_5, "intermediate_size": 512}},
        ("2-bit products whose inputs are rotated", "gated delta rule and attention"),
        note="a rotated product mixes all its inputs: it is not cut by columns",
        draws=((r"down_proj\.scales$", 0.04, 0.0), (r"down_proj\.biases$", -0.06, 0.0),
               (r"up_proj\.scales$", 0.08, 0.0), (r"up_proj\.biases$", -0.12, 0.0)),
    ),
    Entry(
        "olmo_hybrid",
        sized("olmo_hybrid", **DELTA, layer_types=pattern("LLFLLFL"), linear_allow_neg_eigval=True,
              tie_word_embeddings=False, attention_bias=False),
        ("gated delta rule with negative eigenvalues", "full attention in every third layer",
         "norms of q and k over all heads"),
        note="the norms of q and k need the sum of squares over all ranks",
    ),
    Entry(
        "plamo2",
        sized("plamo2", num_hidden_layers=LAYERS, hidden_size_per_head=16, mamba_d_state=16, mamba_d_conv=4,
              mamba_num_heads=8, mamba_step=2, tie_word_embeddings=True),
        ("state space and attention by turns", "weights for each head's norm", "fused qkv", "fused gate and up",
         "tied embeddings"),
        note="step size, B and C are sums over all channels and need one more all-reduce",
        draws=(ADDS_ONE, (r"\.[qk]_weight$|_norm_weight$", 1.0, 0.1)),
    ),
    Entry(
        "bailing_moe_linear",
        sized("bailing_moe_linear", **_BAILING, norm_topk_prob=True, group_norm_size=4, use_qk_norm=True,
              use_qkv_bias=True, partial_rotary_factor=0.5, moe_router_enable_expert_bias=True,
              score_function="sigmoid"),
        ("linear attention with a decay for each head, full in every third layer", "norms by groups of heads",
         "8 experts in 4 groups, 3 a token", "a shared expert", "a dense layer first"),
        note="decays depend on head and layer: a rank keeps those of its heads",
    ),
    Entry(
        "bailing_hybrid",
        sized("bailing_hybrid", **{**LATENT, **_BAILING}, group_norm_size=4, norm_topk_prob=True, use_qk_norm=True),
        ("linear attention with a decay for each head, latent attention in every third layer",
         "8 experts in 4 groups, 3 a token", "a shared expert", "a dense layer first"),
        note="decays depend on head and layer; " + CACHE,
    ),
    Entry(
        "bailing_moe_v3",
        {**sized("bailing_hybrid", **{**LATENT, **_BAILING}, short_conv_kernel_size=4),
         "architectures": ["BailingMoeV3ForCausalLM"]},
        ("delta rule with a gate for each channel, latent attention in every third layer",
         "8 experts in 4 groups, 3 a token", "a shared expert", "a gate for each head"),
        note=CACHE,
    ),
    Entry(
        "kimi_linear",
        sized("kimi_linear", **_KIMI, head_dim=16, linear_attn_config=_KIMI_DELTA, model_max_length=512),
        ("delta rule with a gate for each channel, latent attention without rope in every third layer",
         "8 experts in 4 groups, 3 a token", "a shared expert", "2 dense layers first", "caches of 1 and of 4 parts"),
        note=CACHE,
    ),
    Entry(
        "kimi_k3",
        {"model_type": "kimi_k3",
         "text_config": sized("kimi_linear", **_KIMI, hidden_act="situ", activation_situ_beta=2.0,
                              activation_situ_linear_beta=3.0, attn_res_block_size=2, mla_use_nope=True,
                              mla_use_output_gate=True, routed_expert_hidden_size=64, latent_moe_use_norm=True,
                              linear_attn_config={**_KIMI_DELTA, "gate_lower_bound": -5.0})},
        ("layers attend to the residual stream of earlier blocks", "delta rule and latent attention",
         "8 experts in a latent space, 3 a token", "a shared expert", "2 dense layers first"),
        note="the streams of earlier blocks travel between stages; " + CACHE,
        draws=_GENTLE_RESIDUALS,
    ),
]  # fmt: skip
