"""What a config.json alone says of a model's bytes, as mlx-lm reads it: what is packed and how, and what is tied."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx import nn

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import catalogue, sizes
from mlxcel_nb.models.loading import load_part, whole
from tests.models.test_sizes import as_built, nbytes
from tests.published import PUBLISHED

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 201088, "rms_norm_eps": 1e-5, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128, "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
"""As openai/gpt-oss-20b has it, but for its `quantization_config`."""

PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

PUBLISHED_BYTES = 13_761_264_768
"""`total_size` of openai/gpt-oss-20b's own index of weights."""


def planned(config: dict[str, Any]) -> int:
    return sizes.gather(copy.deepcopy(config), name="m").weights


def test_modules_that_a_publisher_left_plain_are_counted_plain() -> None:
    method = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN}
    assert planned({**GPT_OSS, "quantization_config": method}) == PUBLISHED_BYTES


@pytest.mark.parametrize(("mode", "group", "bits"), [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)])
def test_an_entry_without_a_mode_is_affine_whatever_the_model_is(mode: str, group: int, bits: int) -> None:
    """What mlx-lm writes for a model whose predicate wants 8 bits in groups of 64 for some modules."""
    config: dict[str, Any] = {**GPT_OSS, "num_hidden_layers": 2, "layer_types": GPT_OSS["layer_types"][:2]}
    model = as_built({**config, "torch_dtype": "bfloat16"})
    table: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}

    def predicate(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        own = model.quant_predicate(path, module)
        if isinstance(own, dict):
            table[path] = dict(own)
        return own

    nn.quantize(model, group, bits, mode=mode, class_predicate=predicate)
    assert table["model.layers.0.mlp.router"] == {"group_size": 64, "bits": 8}
    assert planned({**config, "quantization": table}) == nbytes(model)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"group_size": 32, "bits": 4, "mode": "int3"}, "unknown quantisation mode 'int3'"),
        ({"group_size": "32", "bits": 4}, "4 bits in groups of '32'"),
        ({"group_size": 64, "bits": 7}, "no affine quantisation of 7 bits in groups of 64"),
        ({"group_size": 64, "bits": 4, "mode": "mxfp4"}, "no mxfp4 quantisation of 4 bits in groups of 64"),
    ],
)
def test_a_table_that_says_nothing_known_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        planned({**GPT_OSS, "num_hidden_layers": 2, "quantization": table})


def test_weights_that_have_to_be_converted_are_refused_with_what_plans_them_all_the_same() -> None:
    config = {**PUBLISHED["8B dense"].config, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(ModelError, match="--bits 4"):
        planned(config)
    assert sizes.gather(sizes.as_converted(config, 4), name="m").weights == pytest.approx(8.03e9 * 4.5 / 8, rel=0.01)


GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}  # fmt: skip
"""As google/gemma-3-27b-it has it: a text model within, and not a word about tying or the vocabulary."""


def test_a_text_model_within_reads_its_embedding_as_head_where_nothing_is_said() -> None:
    """mlx-lm drops the head when files have none, and published ones have none."""
    facts = sizes.gather(copy.deepcopy(GEMMA3), name="gemma")
    assert facts.weights == nbytes(as_built(PUBLISHED["sliding window"].config))
    assert facts.vocab == 262208
    untied = {**GEMMA3, "text_config": {**GEMMA3["text_config"], "tie_word_embeddings": False}}
    assert planned(untied) == facts.weights + 2 * 262208 * 5376


def test_a_model_whose_config_names_no_vocabulary_loads_into_what_was_planned(tmp_path: Path) -> None:
    one = catalogue.entry("gemma3")
    assert one is not None
    text = {key: value for key, value in one.config["text_config"].items() if key != "vocab_size"}
    text |= {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    config = {"model_type": "gemma3", "torch_dtype": "float32", "text_config": text}
    folder = catalogue.write(replace(one, config=config, absent=("language_model.lm_head.weight",)), tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(config))
    part = load_part(folder, whole(3), dtype="native")
    assert part.vocab_size == 262208
    assert part.resident_bytes == planned(config)
