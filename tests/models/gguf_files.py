"""Small GGUF files for tests, written by the `gguf` package: a random Llama with known weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from mlxcel_nb.models.gguf_file import GgufFile
from mlxcel_nb.models.gguf_tokenizer import tokenizer_files
from mlxcel_nb.models.tokenizer import load_tokenizer

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, VOCAB = 64, 4, 2, 96, 2, 300
MATRICES = {
    "attn_q": ("self_attn.q_proj", HIDDEN, HIDDEN),
    "attn_k": ("self_attn.k_proj", HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_v": ("self_attn.v_proj", HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_output": ("self_attn.o_proj", HIDDEN, HIDDEN),
    "ffn_gate": ("mlp.gate_proj", FFN, HIDDEN),
    "ffn_up": ("mlp.up_proj", FFN, HIDDEN),
    "ffn_down": ("mlp.down_proj", HIDDEN, FFN),
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def weights(seed: int = 0, *, tied: bool = True, bias: bool = False) -> dict[str, tuple[str, np.ndarray]]:
    """GGUF name to (folder's name, array), in the folder's order of rows."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    found = {
        "token_embd.weight": ("model.embed_tokens.weight", matrix(VOCAB, HIDDEN)),
        "output_norm.weight": ("model.norm.weight", 1 + 0.1 * matrix(HIDDEN)),
    }
    if not tied:
        found["output.weight"] = ("lm_head.weight", matrix(VOCAB, HIDDEN))
    for layer in range(LAYERS):
        for name, (module, rows, columns) in MATRICES.items():
            stem = f"model.layers.{layer}.{module}"
            found[f"blk.{layer}.{name}.weight"] = (f"{stem}.weight", matrix(rows, columns))
            if bias and name.startswith("attn_"):
                found[f"blk.{layer}.{name}.bias"] = (f"{stem}.bias", 0.1 * matrix(rows))
        for name, module in NORMS.items():
            found[f"blk.{layer}.{name}.weight"] = (f"model.layers.{layer}.{module}.weight", 1 + 0.1 * matrix(HIDDEN))
    return found


def llama_cpp_rows(array: np.ndarray, heads: int) -> np.ndarray:
    """Each head's two halves interleaved, row by row, as llama.cpp's rotation of neighbours wants them."""
    size = len(array) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return array[order]


def byte_tokenizer(writer: GGUFWriter, **changes: Any) -> None:
    """A byte-level vocabulary of 256 bytes, a few merges and special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = ["<s>", "</s>", *(letters[byte] for byte in range(256)), "th", "the", "Ġthe"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model(changes.get("kind", "gpt2"))
    if pre := changes.get("pre", "gpt-2"):
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(["t h", "th e", "Ġ the"])
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(changes.get("add_bos", True))


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    quantise: str = "F32",
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Write a file; returns the numbers it holds, under the folder's names.

    Args:
        quantise: type of every matrix. The K types and others the package cannot write get random bytes.
        extra: further tensors, float32.
        metadata: further keys: int, float, bool or str.
        options: of `weights`.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in {
        "block_count": LAYERS, "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
    }.items():  # fmt: skip
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in (metadata or {}).items():
        add: Any = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    if tokenizer is None or tokenizer:
        byte_tokenizer(writer, **(tokenizer or {}))
    held = {}
    for name, (folder_name, array) in weights(**options).items():
        heads = HEADS if ".attn_q." in name else KV_HEADS if ".attn_k." in name else 0
        rows = llama_cpp_rows(array, heads) if heads else array
        kind = GGMLQuantizationType.F32 if rows.ndim == 1 else GGMLQuantizationType[quantise]
        raw = gguf.quants.quantize(rows, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        unpacked = gguf.quants.dequantize(raw, kind).reshape(rows.shape)
        held[folder_name] = unpacked[np.argsort(llama_cpp_rows(np.arange(len(rows)), heads))] if heads else unpacked
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def metadata_file(**fields: Any) -> GgufFile:
    return GgufFile(
        path=Path("x.gguf"), tensors={}, metadata={f"tokenizer.{key}": value for key, value in fields.items()}
    )


def load_from(folder: Path, file: GgufFile) -> Any:
    for name, content in tokenizer_files(file).items():
        (folder / name).write_text(json.dumps(content))
    return load_tokenizer(folder)


def sentencepieces(folder: Path) -> tuple[Any, Any]:
    """A tokenizer of SentencePiece's kind as a GGUF file gives it, and the library's own of the same vocabulary."""
    import sentencepiece

    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(["the quick brown fox jumps over the lazy dog", "pack my box with five dozen"] * 50))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "spm"), vocab_size=330, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    ids = range(theirs.vocab_size())
    types = [2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in ids]
    file = metadata_file(
        **{
            "ggml.model": "llama",
            "ggml.tokens": [theirs.id_to_piece(i) for i in ids],
            "ggml.scores": [theirs.get_score(i) for i in ids],
            "ggml.token_type": types,
            "ggml.bos_token_id": theirs.bos_id(),
            "ggml.eos_token_id": theirs.eos_id(),
            "ggml.unknown_token_id": theirs.unk_id(),
        }
    )
    return load_from(folder, file), theirs
