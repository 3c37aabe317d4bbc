"""Which file of mlx-lm's needs which family: the one table to add a line to."""

from __future__ import annotations

from mlxcel_nb.models.staging import looped, several, shared_kv
from mlxcel_nb.models.staging.family import Family

FAMILIES: dict[str, type[Family]] = {
    "afm7": shared_kv.ReuseLayers,
    "deepseek_v41": several.SharedChoices,
    "gemma3n": shared_kv.PerLayerInputs,
    "gemma4_text": shared_kv.CarriedCaches,
    "hunyuan": several.Borrowed,
    "iquestloopcoder": looped.TwoLoops,
    "kimi_k3": several.ResidualBlocks,
    "muse_spark": several.NextNorm,
    "nanbeige": looped.Loops,
    "rwkv7": several.FirstValues,
    "talkie": several.SeenEmbedding,
}
"""By the file that has the loop over the layers, which a model of several parts may share with others."""


def family_of(file: str) -> type[Family]:
    """The family of a file of mlx-lm's; most have nothing special, one that is new among them."""
    return FAMILIES.get(file, Family)
