"""The *tiny* model of the tests: random Llama-like float32 weights as an ordinary model folder on disk.

Hidden 64, 5 layers, 8 heads of 8, 4 kv-heads, ffn 192, vocabulary 257, seed 0. Options vary one thing at a time:
other head counts, biases, an untied head, quantisation. Written with NumPy, so that any test may use it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 192,
    "vocab_size": 257,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def make_tiny(folder: Path, *, seed: int = 0, weights: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """Write a tiny model to `folder` (made if absent) and return it.

    Args:
        weights: instead of random ones.
        changes: keys of config.json, e.g. `num_key_value_heads=2`, `attention_bias=True`.
    """
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    write_safetensors(folder / "model.safetensors", weights or random_weights(config, seed))
    write_tokenizer(folder)
    return folder


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by Hugging Face's names, scaled so that activations keep their size through the layers."""
    rng = np.random.default_rng(seed)
    dim, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    qwen2, qwen3 = config["model_type"] == "qwen2", config["model_type"] == "qwen3"
    biased = {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                        config.get("attention_bias") or qwen2),
        "self_attn.o_proj": config.get("attention_bias") and not qwen3,
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), config.get("mlp_bias")),
    }  # fmt: skip
    shapes = {
        "self_attn.q_proj": (queries, dim),
        "self_attn.k_proj": (keys, dim),
        "self_attn.v_proj": (keys, dim),
        "self_attn.o_proj": (dim, queries),
        "mlp.gate_proj": (ffn, dim),
        "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
    }
    weights = {"model.embed_tokens.weight": _normal(rng, (config["vocab_size"], dim), 1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = _normal(rng, shape, shape[1] ** -0.5)
            if biased[name]:
                weights[f"{prefix}.{name}.bias"] = _normal(rng, shape[:1], 0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = 1 + _normal(rng, (dim,), 0.1)
        if qwen3:
            for name in ("q_norm", "k_norm"):
                weights[f"{prefix}.self_attn.{name}.weight"] = 1 + _normal(rng, (head_dim,), 0.1)
    weights["model.norm.weight"] = 1 + _normal(rng, (dim,), 0.1)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = _normal(rng, (config["vocab_size"], dim), dim**-0.5)
    return weights


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


_DTYPES = {"float32": "F32", "float16": "F16", "uint32": "U32", "uint8": "U8"}


def write_safetensors(file: Path, weights: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, array in weights.items():
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for array in weights.values():
            stream.write(np.ascontiguousarray(array).tobytes())


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: token i is byte i, and 256 ends the text."""
    alphabet = _byte_alphabet()
    vocab = {alphabet[i]: i for i in range(256)}
    special = {
        "id": 256, "content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    }  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [special], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-ins for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(spare)
            spare += 1
    return table


def quantise_tiny(
    folder: Path, source: Path, *, overrides: dict[str, Any] | None = None, list_overrides: bool = True, **how: Any
) -> Path:
    """A quantised copy of a tiny model. Imports MLX.

    Args:
        overrides: module path -> its own group_size, bits and mode, or False to keep it as it is.
        list_overrides: whether config.json names them; a layer of another kind that it does not name is legal too.
        how: group_size, bits, mode of the rest.
    """
    import mlx.core as mx

    config = json.loads((source / "config.json").read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    result = {}
    for name, array in mx.load(str(source / "model.safetensors")).items():
        path = name.removesuffix(".weight")
        own = (overrides or {}).get(path, how)
        if array.ndim != 2 or own is False:
            result[name] = array
            continue
        parts = mx.quantize(array, **own)
        result.update(
            {f"{path}.{leaf}": part for leaf, part in zip(("weight", "scales", "biases"), parts, strict=False)}
        )
    mx.save_safetensors(str(folder / "model.safetensors"), result, {"format": "mlx"})
    config["quantization"] = {**how, **((overrides or {}) if list_overrides else {})}
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    write_tokenizer(folder)
    return folder
