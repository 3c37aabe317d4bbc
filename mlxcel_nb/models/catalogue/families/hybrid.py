"""Attention and recurrent layers in one stack: state space, delta rule, short convolutions, linear recurrences."""

from __future__ import annotations

from typing import Any

from mlxcel_nb.models.catalogue.entry import ADDS_ONE, EXPERTS, LAYERS, WINDOW, Entry, pattern, sized

DELTA: dict[str, Any] = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}

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
        sized("lfm2", norm_eps=1e-5, conv_bias=True, conv_L_cache=3, block_dim=128, block_multiple_of=32,
              block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=True, block_ff_dim=192,
              full_attn_idxs=[2, 4, 6]),
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
]  # fmt: skip
