"""Which architectures can read chunks of prompts in the forward in which other sequences decode. Pure.

Such a forward has every token as a sequence of its own, and only caches and attention know which of them belong
together (`mixing`). That is right for code of mlx-lm's that keeps keys and values, of all tokens or of a window, and
leaves all of the attention to `scaled_dot_product_attention`. What is not in the table is never mixed. Any thread.
"""

from __future__ import annotations

MIXED: frozenset[str] = frozenset({
    "afmoe", "apertus", "bailing_moe", "cohere", "cohere2", "dbrx", "deepseek", "deepseek_v2", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "gemma", "gemma3", "gemma3_text", "glm", "glm4", "glm4_moe",
    "gpt2", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "hunyuan", "hunyuan_v1_dense", "Klear",
    "laguna", "lille-130m", "llama", "llama4_text", "mellum", "mimo", "mimo_v2_flash", "minicpm", "minicpm3", "minimax",
    "ministral3", "mistral3", "mixtral", "muse_glimmer", "nanochat", "nemotron", "nemotron-nas", "olmo2", "olmo3",
    "olmoe", "openelm", "phi", "phi3", "phimoe", "phixtral", "pixtral", "plamo3", "qwen", "qwen2", "qwen2_moe",
    "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss", "smollm3", "solar_open", "spark2_5",
    "stablelm", "starcoder2", "step3p5", "talkie", "telechat3", "youtu_llm",
})  # fmt: skip
"""By the file of mlx-lm's that has the model. A file whose layers another one uses has to be here as well."""

LAZY = MIXED - {"dbrx"}
"""Of these a test proves that their code evaluates nothing while a forward is built. dbrx looks at its experts."""

_POSITIONS = "its attention computes with the mask, to which it adds what positions alone score"
_TWICE = "it runs its layers twice, with a cache for each time"
_BORROWED = "late layers read keys and values in an earlier one's cache"

UNMIXED: dict[str, str] = {
    "deepseek_v3": _POSITIONS,
    "gemma3n": _BORROWED,
    "gemma4": _BORROWED,
    "gemma4_text": _BORROWED,
    "glm4_moe_lite": _POSITIONS,
    "iquestloopcoder": _TWICE,
    "kimi_k25": _POSITIONS,
    "kimi_vl": _POSITIONS,
    "mistral4": _POSITIONS,
    "nanbeige": _TWICE,
    "plamo": "it repeats keys and values after they have left the cache",
}
"""Those that keep nothing but keys and values, decode together, and cannot be mixed; and why."""
