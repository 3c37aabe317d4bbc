"""Configurations of published models, as far as they decide a model's shapes. No weights.

Written down from what the publishers say of each (config.json and model card on the hub), under the name it has there;
`parameters` is the count that the same source gives, which tells a slip of the pen in the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    source: str
    parameters: float
    config: dict[str, Any]


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip

PUBLISHED = {
    "8B dense": Published(
        "meta-llama/Llama-3.1-8B-Instruct", 8.03e9,
        {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
         "rope_theta": 500000.0, "rope_scaling": _LLAMA3, "max_position_embeddings": 131072,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    "70B dense, 4-bit": Published(
        "mlx-community/Llama-3.3-70B-Instruct-4bit", 70.6e9,
        {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
         "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
         "rope_theta": 500000.0, "rope_scaling": _LLAMA3, "max_position_embeddings": 131072,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization": {"group_size": 64, "bits": 4}},
    ),
    "mixture of experts": Published(
        "Qwen/Qwen3-235B-A22B", 235.1e9,
        {"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94,
         "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
         "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960, "num_experts": 128,
         "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "norm_topk_prob": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    "latent attention": Published(
        "deepseek-ai/DeepSeek-V2-Lite", 15.7e9,
        {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
         "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "rms_norm_eps": 1e-6,
         "rope_theta": 10000, "max_position_embeddings": 163840, "kv_lora_rank": 512, "q_lora_rank": None,
         "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 64,
         "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "moe_layer_freq": 1,
         "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1,
         "topk_group": 1, "attention_bias": False, "torch_dtype": "bfloat16",
         "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                          "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}},
    ),
    "state space and attention": Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct, without its layer that predicts further tokens", 79.7e9,
        {"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
         "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
         "rms_norm_eps": 1e-6, "rope_theta": 10000000, "partial_rotary_factor": 0.25,
         "max_position_embeddings": 262144, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
         "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
         "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "norm_topk_prob": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
    ),
    "sliding window": Published(
        "google/gemma-3-27b-it, its text model", 27.0e9,
        {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
         "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208,
         "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window": 1024,
         "sliding_window_pattern": 6, "query_pre_attn_scalar": 168, "max_position_embeddings": 131072,
         "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "torch_dtype": "bfloat16"},
    ),
}  # fmt: skip
"""By what is special in each."""
