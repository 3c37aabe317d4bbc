"""Decoders in the manner of Llama: rotary positions, grouped queries, a gated feed-forward in every layer."""

from __future__ import annotations

from typing import Any

from mlxcel_nb.models.catalogue.entry import ADDS_ONE, LAYERS, WINDOW, Entry, pattern, sized

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

_LLAMA = sized(
    "llama", tie_word_embeddings=False, sliding_window=WINDOW, layer_types=pattern("FSSFSSF"), rope_scaling=LLAMA3
)

_MINISTRAL3 = sized(
    "ministral3", head_dim=16, tie_word_embeddings=False, sliding_window=WINDOW, layer_types=pattern("SFSSFSS"),
    rope_parameters={"type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
                     "beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                     "mscale_all_dim": 1.0},
)  # fmt: skip

_NAS_BLOCKS: list[dict[str, dict[str, Any]]] = [
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
    {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.5}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"replace_with_linear": True}},
    {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
    {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.5}},
]

ENTRIES = [
    Entry(
        "llama",
        _LLAMA,
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
    Entry(
        "ministral3",
        _MINISTRAL3,
        ("sliding and full attention", "yarn", "queries scaled by position", "untied head"),
    ),
    Entry(
        "mistral3",
        {"model_type": "mistral3", "text_config": _MINISTRAL3},
        ("a wrapper around ministral3",),
    ),
    Entry(
        "pixtral",
        {"model_type": "pixtral", "text_config": {**_LLAMA, "layer_types": pattern("FSFSFSF")}},
        ("a wrapper around llama",),
    ),
    Entry(
        "qwen",
        sized("qwen", "num_key_value_heads",  kv_channels=16, layer_norm_epsilon=1e-5, no_bias=True,
              intermediate_size=384),
        ("fused qkv with bias", "no grouped queries", "untied head"),
    ),
    Entry(
        "qwen2_vl",
        {"model_type": "qwen2_vl", "text_config": sized("qwen2", tie_word_embeddings=False)},
        ("a wrapper around qwen2",),
    ),
    Entry(
        "qwen3_vl",
        {"model_type": "qwen3_vl", "text_config": sized("qwen3", head_dim=24, tie_word_embeddings=True)},
        ("a wrapper around qwen3",),
    ),
    Entry(
        "apertus",
        sized("apertus", mlp_bias=False, attention_bias=False, post_norm=False, qk_norm=True,
              tie_word_embeddings=False, rope_scaling=LLAMA3),
        ("xIELU with learned figures", "feed-forward without gate", "norms of q and k per head", "llama3 rope scaling"),
        draws=((r"alpha_[np]$|\.beta$", 0.5, 0.05), (r"\.eps$", -1e-6, 0.0)),
    ),
    Entry(
        "ernie4_5",
        sized("ernie4_5", head_dim=24, use_bias=True, tie_word_embeddings=True),
        ("interleaved rope", "biases everywhere", "tied embeddings"),
    ),
    Entry(
        "exaone",
        sized("exaone", "num_hidden_layers",  num_layers=LAYERS, layer_norm_epsilon=1e-5, tie_word_embeddings=False,
              rope_scaling=LLAMA3),
        ("other names for all parts", "llama3 rope scaling", "untied head"),
    ),
    Entry(
        "exaone4",
        sized("exaone4", head_dim=16, tie_word_embeddings=False, sliding_window=WINDOW, sliding_window_pattern="LLG",
              rope_scaling=LLAMA3),
        ("sliding attention with rope, full without", "norms after the blocks", "norms of q and k per head"),
    ),
    Entry(
        "glm",
        sized("glm", head_dim=16, attention_bias=True, tie_word_embeddings=False),
        ("fused gate and up", "half of each head rotated, interleaved", "biases on q, k and v"),
    ),
    Entry(
        "helium",
        sized("helium", head_dim=16, attention_bias=False, mlp_bias=False, tie_word_embeddings=False),
        ("interleaved rope", "untied head"),
    ),
    Entry(
        "hunyuan_v1_dense",
        sized("hunyuan_v1_dense", head_dim=16, use_qk_norm=True, tie_word_embeddings=True,
              rope_scaling={"alpha": 50.0, "factor": 1.0, "type": "dynamic"}),
        ("norms of q and k after rope", "rope base scaled by alpha", "tied embeddings"),
    ),
    Entry(
        "internlm2",
        sized("internlm2", bias=True, tie_word_embeddings=False, rope_scaling={"type": "dynamic", "factor": 2.0}),
        ("qkv fused by kv-group", "biases", "dynamic rope scaling"),
    ),
    Entry(
        "internlm3",
        sized("internlm3", bias=True, qkv_bias=True, tie_word_embeddings=False,
              rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        ("biases everywhere", "dynamic rope scaling"),
    ),
    Entry(
        "iquestloopcoder",
        sized("iquestloopcoder", head_dim=16, loop_num=2, loop_window_size=WINDOW, tie_word_embeddings=False),
        ("the stack is run twice", "second loop mixes full and sliding attention by a gate", "two caches a layer"),
        note="a stage is visited twice for every token; keys of the first loop serve the second",
    ),
    Entry(
        "nanbeige",
        sized("nanbeige", head_dim=16, num_loops=2, tie_word_embeddings=False),
        ("the stack is run twice, a norm after each", "two caches a layer"),
        note="a stage is visited twice for every token",
    ),
    Entry(
        "mimo",
        sized("mimo", tie_word_embeddings=False, num_nextn_predict_layers=1),
        ("biases on q, k and v", "untied head"),
    ),
    Entry(
        "nemotron",
        sized("nemotron", hidden_act="relu2", norm_eps=1e-5, head_dim=16, attention_bias=False, mlp_bias=False,
              partial_rotary_factor=0.5, tie_word_embeddings=False),
        ("layer norms of one plus their weight", "squared ReLU without gate", "partial rotary"),
        draws=(ADDS_ONE,),
    ),
    Entry(
        "nemotron-nas",
        sized("nemotron-nas", "num_key_value_heads", "intermediate_size",  block_configs=_NAS_BLOCKS,
              hidden_act="silu", tie_word_embeddings=False),
        ("layers without attention, without feed-forward, with a linear in their place", "2 or 4 kv-heads",
         "feed-forwards of two sizes"),
        note="layers of 2 kv-heads are cut for 2 ranks, those of 4 for 4",
    ),
    Entry(
        "nanochat",
        sized("nanochat", intermediate_size=512),
        ("norms without weights", "negated rope", "squared ReLU", "soft cap on logits", "untied head"),
    ),
    Entry(
        "plamo",
        sized("plamo", "num_key_value_heads",  n_shared_head=2),
        ("attention beside feed-forward", "heads that share keys and values by repetition"),
    ),
    Entry(
        "plamo3",
        sized("plamo3", head_dim=16, window_size=WINDOW, sliding_window_pattern=3, rope_local_theta=1000.0,
              tie_word_embeddings=False),
        ("fused qkv", "fused gate and up", "sliding and full attention", "norms around the blocks"),
        drifts="its cache holds one position fewer than its mask shows",
        draws=(ADDS_ONE,),
    ),
    Entry(
        "seed_oss",
        sized("seed_oss", head_dim=24, attention_bias=True, attention_out_bias=True, mlp_bias=True,
              tie_word_embeddings=False),
        ("head size that is not hidden over heads", "biases everywhere"),
    ),
    Entry(
        "spark2_5",
        sized("spark2_5", head_dim=16, sliding_window=WINDOW, layer_types=pattern("SSFSSFS"),
              rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                               "full_attention": {"rope_type": "default", "rope_theta": 10000.0,
                                                  "partial_rotary_factor": 0.5}}),
        ("a gate for each head", "sliding and full attention, each with its own rope", "tied embeddings"),
    ),
    Entry(
        "stablelm",
        sized("stablelm", use_qkv_bias=True, partial_rotary_factor=0.25, layer_norm_eps=1e-5,
              use_parallel_residual=True, qk_layernorm=True),
        ("attention beside feed-forward", "a norm of each head's own", "partial rotary", "biases on q, k and v"),
    ),
    Entry(
        "talkie",
        sized("talkie", "num_key_value_heads",  head_dim=16),
        ("norms without weights", "a gain for each head", "negated rope", "the embedding joins every layer"),
        note="every layer reads the normed embedding: it travels between stages",
        draws=((r"_g$", 1.0, 0.1),),
    ),
    Entry(
        "telechat3",
        sized("telechat3", head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
              rope_scaling={"rope_type": "telechat3-yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        ("yarn", "biases"),
    ),
    Entry(
        "muse_glimmer",
        sized("muse_glimmer", head_dim=16, post_norm_eps=1e-6, sliding_window=WINDOW, layer_types=pattern("SSFSSFS"),
              final_logit_softcapping=20.0, output_multiplier=1.0, qk_scale_factor=2.0),
        ("sliding attention with rope, full without", "gated attention", "norms around the blocks",
         "soft cap on logits"),
        draws=((r"\.norm\.weight$", 1.0, 0.1), ADDS_ONE),
    ),
    Entry(
        "bitnet",
        sized("bitnet", head_dim=16, tie_word_embeddings=True),
        ("ternary weights, four to a byte", "norms before the last products", "squared ReLU"),
        fails="[metal_kernel] No Metal back-end",
    ),
    Entry(
        "baichuan_m1",
        sized("baichuan_m1", sliding_window=WINDOW, sliding_window_layers=[1, 2, 4, 5], conv_window=2,
              num_swa_attention_heads=8, num_swa_key_value_heads=2, tie_word_embeddings=False),
        ("keys and values convolved over two positions", "sliding layers with other kv-heads", "fused qkv",
         "a head of normed rows", "a pair of caches a layer"),
        note="sliding layers have 2 kv-heads, full ones 4",
        draws=((r"conv_[kv]$", 0.5, 0.3),),
    ),
    Entry(
        "openelm",
        {"model_type": "openelm", "head_dim": 16, "num_transformer_layers": LAYERS, "model_dim": 128,
         "vocab_size": 257, "ffn_dim_divisor": 32, "num_query_heads": [4, 4, 8, 8, 8, 12, 12],
         "num_kv_heads": [2, 2, 4, 4, 4, 4, 4], "ffn_multipliers": [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]},
        ("heads and feed-forward that differ from layer to layer", "fused qkv", "fused gate and up",
         "norms of q and k per head", "tied embeddings"),
        note="the first two layers have 2 kv-heads, the others 4",
    ),
    Entry(
        "afm7",
        {"model_type": "afm7", "vocab_size": 257, "hidden_dim": 128, "num_layers": LAYERS, "num_kv_reuse_layers": 3,
         "num_heads": 8, "num_kv_heads": 4, "hidden_dim_scale_factor": 1.5, "rope_theta": 10000.0},
        ("the last 3 layers use the keys and values of layer 3", "fused qkv", "keys and values rounded to steps",
         "tied embeddings"),
        note="keys and values are rounded: a difference in the last bit of a sum can become a whole step",
        draws=((r"quant_\w+_scale$", 0.5, 0.0),),
    ),
    Entry(
        "lille-130m",
        {"model_type": "lille-130m", "block_size": 512, "layer_norm_eps": 1e-5, "n_embd": 128, "n_head": 8,
         "n_kv_heads": 4, "n_layer": LAYERS, "rope_theta": 10000.0, "vocab_size": 257},
        ("norms inside the blocks", "fused qkv", "tied embeddings"),
    ),
    Entry(
        "olmo",
        {"model_type": "olmo", "d_model": 128, "n_layers": LAYERS, "mlp_hidden_size": 384, "n_heads": 8,
         "vocab_size": 257, "embedding_size": 264, "weight_tying": True},
        ("norms without weights", "fused qkv", "fused gate and up", "embedding larger than the vocabulary"),
        note="with ai2-olmo there, mlx-lm still fails on prompts: it adds its mask's name to the scores",
        fails="model type 'olmo' needs a package that is not installed",
    ),
]  # fmt: skip
