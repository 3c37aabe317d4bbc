"""A GGUF file of the Llama architecture, written as an MLX model folder.

The folder is what mlx-lm and Hugging Face tools read: model.safetensors, config.json, the tokenizer's files. Tensors
are converted one at a time, so memory stays at the largest one. The caller owns the folder and makes it atomic
(store.py). Any thread; no array library but NumPy is touched. The file is not trusted (gguf_file.py checks it).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.gguf_blocks import AFFINE_GROUP, AFFINE_TYPES, READABLE_TYPES, decode, to_affine
from mlxcel_nb.models.gguf_file import GgufFile, GgufTensor, read_gguf
from mlxcel_nb.models.gguf_tokenizer import tokenizer_files
from mlxcel_nb.models.registry import Precision, Progress
from mlxcel_nb.plan.elements import ITEM_SIZE

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def convert(path: str | Path, folder: Path, *, precision: Precision, progress: Progress | None = None) -> None:
    """Write the model in the GGUF file `path` into the existing, empty `folder`.

    Raises:
        ModelError: an architecture, quantisation, tokenizer or rope scaling that is not supported, by its name.
    """
    file = read_gguf(path)
    tensors = _planned(file)
    floats = _float_type(tensors, precision)
    config = _config(file, tensors, precision)
    for name, content in {**tokenizer_files(file), "config.json": config}.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    layout = [entry for name, tensor in tensors.items() for entry in _layout(name, tensor, precision, floats)]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    arrays = (
        _permuted(name, array, heads)
        for name, tensor in tensors.items()
        for array in _arrays(file, tensor, precision, floats)
    )
    _write_safetensors(folder / "model.safetensors", layout, arrays, progress)


def folder_bytes(path: str | Path, precision: Precision) -> int:
    """Bytes the converted folder takes: weights, and room for the tokenizer's and config files."""
    file = read_gguf(path)
    tensors = _planned(file)
    floats = _float_type(tensors, precision)
    layout = [entry for name, tensor in tensors.items() for entry in _layout(name, tensor, precision, floats)]
    return sum(_nbytes(dtype, shape) for _, dtype, shape in layout) + (8 << 20)


def _planned(file: GgufFile) -> dict[str, GgufTensor]:
    """The tensors to convert under their names in the folder, in the order a loader wants them."""
    architecture = file.metadata.get("general.architecture", "none")
    if architecture != "llama":
        raise ModelError(
            f"{file.path.name}: the GGUF architecture {architecture!r} is not supported",
            advice="Give a GGUF file of the llama architecture, or the model's MLX folder.",
        )
    if experts := file.metadata.get("llama.expert_count", 0):
        raise ModelError(f"{file.path.name}: GGUF files with {experts} experts are not supported")
    planned = {}
    for name, tensor in file.tensors.items():
        if name == "rope_freqs.weight":
            continue
        if tensor.type not in READABLE_TYPES:
            raise ModelError(f"{file.path.name}: the quantisation {tensor.type} of {name} is not supported")
        planned[_folder_name(file, name)] = tensor
    for needed in ("model.embed_tokens.weight", "model.norm.weight"):
        if needed not in planned:
            raise ModelError(f"{file.path.name} has no tensor for {needed}")
    return dict(sorted(planned.items(), key=_reading_order))


def _folder_name(file: GgufFile, name: str) -> str:
    first, *rest = name.split(".")
    if first == "blk" and len(rest) == 3 and rest[0].isdecimal() and rest[1] in _BLOCK_NAMES:
        return f"model.layers.{int(rest[0])}.{_BLOCK_NAMES[rest[1]]}.{rest[2]}"
    if first in _TOP_NAMES and len(rest) == 1:
        return f"{_TOP_NAMES[first]}.{rest[0]}"
    raise ModelError(f"{file.path.name}: the tensor {name} has no place in a Llama model")


def _reading_order(item: tuple[str, GgufTensor]) -> tuple[int, str]:
    """Embedding, layers by number, then norm and head."""
    parts = item[0].split(".")
    if parts[1] == "layers":
        return int(parts[2]), item[0]
    return (-1 if parts[1] == "embed_tokens" else 1 << 30), item[0]


def _keeps(tensor: GgufTensor, precision: Precision) -> bool:
    return precision == "kept" and tensor.type in AFFINE_TYPES and len(tensor.shape) == 2


Layout = tuple[str, str, tuple[int, ...]]


def _float_type(tensors: dict[str, GgufTensor], precision: Precision) -> str:
    """The one float type of all that is not quantised: the embedding's where it has one, as activations follow it."""
    embedding = tensors["model.embed_tokens.weight"].type
    if precision == "float32":
        return "F32"
    return embedding if embedding in ("F32", "BF16") else "F16"


def _layout(name: str, tensor: GgufTensor, precision: Precision, floats: str) -> list[Layout]:
    """Names, dtypes and shapes of what `tensor` becomes."""
    if not _keeps(tensor, precision):
        return [(name, floats, tensor.shape)]
    rows, columns = tensor.shape
    stem = name.removesuffix(".weight")
    groups = (rows, columns // AFFINE_GROUP)
    return [
        (name, "U32", (rows, columns * AFFINE_TYPES[tensor.type] // 32)),
        (f"{stem}.scales", "F16", groups),
        (f"{stem}.biases", "F16", groups),
    ]


def _arrays(file: GgufFile, tensor: GgufTensor, precision: Precision, floats: str) -> list[np.ndarray]:
    """What `tensor` becomes, in the order of `_layout`; bfloat16 as its bits."""
    raw = np.fromfile(file.path, np.uint8, tensor.end - tensor.begin, offset=tensor.begin)
    if _keeps(tensor, precision):
        return list(to_affine(tensor.type, raw, tensor.shape)[:3])
    values = decode(tensor.type, raw, tensor.shape)
    if floats == "BF16":
        return [bfloat16_bits(values)]
    return [values.astype(np.float16 if floats == "F16" else np.float32, copy=False)]


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Finite float32 rounded to the nearest bfloat16, ties to even, as uint16."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _permuted(name: str, array: np.ndarray, heads: dict[str, int]) -> np.ndarray:
    module = name.split(".")[-2]
    return halves_from_pairs(array, heads[module]) if module in heads else array


def halves_from_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection in the order of the rotate-half convention.

    llama.cpp rotates neighbours (2i, 2i+1) of a head, so its converter interleaves each head's two halves; Llama's own
    modules rotate (i, i + head_dim/2). Row 2i + j of a head goes back to j * head_dim/2 + i. Rows are whole, so the
    same works on packed weights, scales and biases.
    """
    rows = array.shape[0]
    return array.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(array.shape)


def _config(file: GgufFile, tensors: dict[str, GgufTensor], precision: Precision) -> dict[str, Any]:
    """config.json, as the model's own would say it."""
    meta = file.metadata

    def need(key: str) -> Any:
        if (value := meta.get(f"llama.{key}")) is None:
            raise ModelError(f"{file.path.name} does not say llama.{key}")
        return value

    heads, hidden = need("attention.head_count"), need("embedding_length")
    if not isinstance(heads, int) or not isinstance(kv_heads := meta.get("llama.attention.head_count_kv", heads), int):
        raise ModelError(f"{file.path.name}: layers with different numbers of heads are not supported")
    vocab = tensors["model.embed_tokens.weight"].shape[0]
    special = {f"{kind}_token_id": meta.get(f"tokenizer.ggml.{name}_token_id") for kind, name in _SPECIAL.items()}
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": meta.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(meta.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in tensors,
        "vocab_size": vocab,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": _TORCH_NAMES[_float_type(tensors, precision)],
        **{key: value for key, value in special.items() if value is not None and value < vocab},
    }
    if quantization := _quantization(tensors, precision):
        config["quantization"] = quantization
    return config


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-05, where the file's four bytes are 9.99999974737e-06."""
    return float(str(np.float32(value)))


def _quantization(tensors: dict[str, GgufTensor], precision: Precision) -> dict[str, Any] | None:
    """mlx-lm's table: the common bits, and the modules that differ."""
    bits = {
        name.removesuffix(".weight"): AFFINE_TYPES[tensor.type]
        for name, tensor in tensors.items()
        if _keeps(tensor, precision)
    }
    if not bits:
        return None
    kinds = sorted(bits.values())
    common = max(set(kinds), key=kinds.count)
    table: dict[str, Any] = {"group_size": AFFINE_GROUP, "bits": common, "mode": "affine"}
    table.update({name: {"group_size": AFFINE_GROUP, "bits": b} for name, b in bits.items() if b != common})
    return table


def _rope_scaling(file: GgufFile) -> dict[str, Any] | None:
    """The `rope_scaling` entry; Llama 3's is recognised by the factors that the file stores as a tensor."""
    meta = file.metadata
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        raw = np.fromfile(file.path, np.uint8, factors.end - factors.begin, offset=factors.begin)
        return _llama3_scaling(file, decode(factors.type, raw, factors.shape))
    kind = meta.get("llama.rope.scaling.type", "none")
    factor = meta.get("llama.rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(factor)}
    if kind == "yarn" and (original := meta.get("llama.rope.scaling.original_context_length")):
        return {"rope_type": "yarn", "factor": _shortest(factor), "original_max_position_embeddings": original}
    raise ModelError(f"{file.path.name}: the rope scaling {kind!r} is not supported")


def _llama3_scaling(file: GgufFile, factors: np.ndarray) -> dict[str, Any]:
    base = file.metadata.get("llama.rope.freq_base", 10000.0)
    scaling = {
        "rope_type": "llama3",
        "factor": _shortest(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(llama3_factors(base, 2 * len(factors), scaling), factors, rtol=1e-3):
        raise ModelError(f"{file.path.name}: the rope factors in the file are not those of Llama 3")
    return scaling


def llama3_factors(base: float, dims: int, scaling: dict[str, Any]) -> np.ndarray:
    """What each rotary frequency is divided by: 1 for short waves, `factor` for long, smooth between (Llama 3)."""
    wavelength = 2 * np.pi * base ** (np.arange(0, dims, 2) / dims)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelength - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ITEM_SIZE[dtype]


def _write_safetensors(
    path: Path, layout: list[Layout], arrays: Iterator[np.ndarray], progress: Progress | None
) -> None:
    """Write `arrays` one after the other, and reach the disk before returning."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    total = 0
    for name, dtype, shape in layout:
        begin, total = total, total + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, total]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    done = 0
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, shape), array in zip(layout, arrays, strict=True):
            if array.nbytes != _nbytes(dtype, shape) or array.shape != shape:
                raise ModelError(f"{name}: {array.dtype.name} {array.shape} where {dtype} {shape} was planned")
            stream.write(np.ascontiguousarray(array).data)
            done += array.nbytes
            if progress:
                progress("convert", done, total)
        stream.flush()
        os.fsync(stream.fileno())
