"""Which rule fits which module: by its class where a family needs one of its own, else by what its parts are called.

Read-only tables; for any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxcel_nb.models.sharding import attention, feed_forward, latent, linear_attention, state_space
from mlxcel_nb.models.sharding.attention import OUTPUTS, QUERIES
from mlxcel_nb.models.sharding.block import Block
from mlxcel_nb.models.sharding.feed_forward import DOWN, FUSED, UP, name_of

Rule = Callable[[Block], None]

MIXTURES = frozenset({
    "Klear.KlearSparseMoeBlock", "afmoe.AfmoeMoE", "bailing_hybrid.SparseMoeBlock",
    "bailing_moe.BailingMoeSparseMoeBlock", "bailing_moe_linear.SparseMoeBlock", "bailing_moe_v3.BailingSparseMoE",
    "dbrx.SparseMoeBlock", "deepseek.DeepseekMoE", "deepseek_v2.DeepseekV2MoE", "deepseek_v3.DeepseekV3MoE",
    "deepseek_v32.DeepseekV32MoE", "deepseek_v41.MoE", "dots1.Dots1MoE", "ernie4_5_moe.Ernie4_5_MoeMLP",
    "exaone_moe.MoE", "glm4_moe.MoE", "glm4_moe_lite.Glm4MoeLiteMoE", "gpt_oss.MLPBlock",
    "granitemoe.GraniteMoeMoE", "granitemoehybrid.GraniteMoeHybridMoE", "hunyuan.MoeBlock",
    "jamba.JambaSparseMoeBlock", "kimi_linear.KimiSparseMoE", "laguna.MoE", "lfm2_moe.Lfm2MoeSparseMoeBlock",
    "llama4.MoE", "mellum.MellumSparseMoeBlock", "mimo_v2_flash.MoE", "minimax.MiniMaxSparseMoeBlock",
    "minimax_m3_vl.SparseMoeBlock", "mistral4.Mistral4MoE", "mixtral.MixtralSparseMoeBlock",
    "nemotron_h.NemotronHMoE", "olmoe.OlmoeSparseMoeBlock", "phimoe.PhiMoESparseMoeBlock", "phixtral.MOE",
    "qwen2_moe.Qwen2MoeSparseMoeBlock", "qwen3_moe.Qwen3MoeSparseMoeBlock", "qwen3_next.Qwen3NextSparseMoeBlock",
    "step3p5.Step3p5MoE",
})  # fmt: skip
"""Mixtures whose output is a weighted sum of their experts' and shared experts': one sum over the ranks does for all.
In others (a norm or the input itself comes after the sum) the experts' own outputs are added up."""


PARALLEL: dict[str, tuple[str, str]] = {
    "cohere.TransformerBlock": ("self_attn", "mlp"),
    "cohere2.TransformerBlock": ("self_attn", "mlp"),
    "falcon_h1.FalconH1DecoderLayer": ("mamba", "self_attn"),
    "gpt_neox.TransformerBlock": ("attention", "mlp"),
    "gptj.GPTJBlock": ("attn", "mlp"),
    "phi.PhiDecoderLayer": ("self_attn", "mlp"),
    "phixtral.ParallelBlock": ("mixer", "moe"),
    "plamo.PlamoDecoderLayer": ("self_attn", "mlp"),
    "stablelm.DecoderLayer": ("self_attn", "mlp"),
}
"""Layers that add up two parts as they are: one sum does for both. The part that is called first stands first."""


def parallel(module: Any) -> tuple[str, str] | None:
    """The two parts of such a layer; where it has a switch for it, only when that is on."""
    return PARALLEL.get(name_of(module)) if getattr(module, "use_parallel_residual", True) else None


def rule(module: Any) -> tuple[str, Rule] | None:
    """What kind of block `module` is and how it is cut; None for what is no block of its own."""
    name = name_of(module)
    if name in OWN:
        return OWN[name]
    parts = set(module)
    kind = {cls.__name__ for cls in type(module).__mro__}
    if kind & {"SwitchGLU", "SwitchMLP"}:
        return "experts", feed_forward.experts
    if "kv_a_proj_with_mqa" in parts:
        return "latent attention", latent.latent_attention
    if parts & set(QUERIES) and parts & set(OUTPUTS) and not parts & UNLIKE:
        return "attention", attention.attention
    file = name.partition(".")[0]
    if attention.FUSED.get(file) in parts and parts & set(OUTPUTS):
        return "attention", attention.fused_attention
    if parts & set(DOWN) and parts & {*UP, *FUSED, "w2"}:
        return "feed-forward", feed_forward.feed_forward
    return None


UNLIKE = frozenset({"q_conv1d", "q_conv", "conv1d", "g_norm", "r_proj", "kv_proj", "b_proj", "indexer"})
"""Parts that make something else of a module with a q_proj and an o_proj."""


OWN: dict[str, tuple[str, Rule]] = {
    "afm7.KVReuseAttention": ("attention", attention.reusing_attention),
    "bailing_hybrid.LinearAttention": ("linear attention", linear_attention.decayed),
    "bailing_moe_linear.LinearAttention": ("linear attention", linear_attention.decayed),
    "bailing_moe_v3.BailingKDA": ("linear attention", linear_attention.channel_gated_delta),
    "falcon_h1.FalconH1Mixer": ("state space", state_space.mamba2),
    "granitemoehybrid.GraniteMoeHybridMamba2Mixer": ("state space", state_space.mamba2),
    "jamba.JambaMambaMixer": ("state space", state_space.mamba),
    "kimi_k3.KimiK3DeltaAttention": ("linear attention", linear_attention.channel_gated_delta),
    "kimi_linear.KimiDeltaAttention": ("linear attention", linear_attention.channel_gated_delta),
    "lfm2.ShortConv": ("short convolution", state_space.short_convolution),
    "lfm2_moe.ShortConv": ("short convolution", state_space.short_convolution),
    "mamba.MambaBlock": ("state space", state_space.mamba),
    "mamba2.Mamba2Block": ("state space", state_space.mamba2),
    "nemotron-nas.LinearSubblockReplacement": ("product", feed_forward.lone_product),
    "nemotron_h.NemotronHMamba2Mixer": ("state space", state_space.mamba2),
    "olmo_hybrid.GatedDeltaNet": ("linear attention", linear_attention.gated_delta),
    "plamo2.Mamba": ("state space", state_space.plamo2_mamba),
    "qwen3_5.GatedDeltaNet": ("linear attention", linear_attention.gated_delta),
    "qwen3_next.Qwen3NextGatedDeltaNet": ("linear attention", linear_attention.gated_delta),
    "rwkv7.Rwkv7TimeMixing": ("linear attention", linear_attention.time_mixing),
    "recurrent_gemma.RecurrentBlock": ("recurrence", state_space.gated_recurrence),
    "baichuan_m1.Attention": ("attention", attention.width_of_input(attention.fused_attention)),
    "deepseek_v41.Attention": ("attention", latent.grouped_output_attention),
    "exaone.AttentionModule": ("attention", attention.width_of_input(attention.attention)),
    "iquestloopcoder.LoopGateProjection": ("gates of heads", attention.loop_gate),
    "plamo.Attention": ("attention", attention.tiled_attention),
}
"""Classes with a rule of their own."""
