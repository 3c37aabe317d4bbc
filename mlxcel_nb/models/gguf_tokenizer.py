"""The tokenizer inside a GGUF file, written as the files that Hugging Face tools read.

Byte-level BPE ("gpt2" in the file) and SentencePiece BPE ("llama") are known, the first with the pre-tokenizers that
Llama-architecture models use. Pure: metadata in, JSON values out.
"""

from __future__ import annotations

from typing import Any

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of the specification."""

END_OF_TURN = frozenset(
    ["<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "</s>"]
)
"""Control tokens that end an answer under any chat template; a file names only one of those its model uses."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS_ALONE = {"type": "Digits", "individual_digits": True}


def _byte_level(*, split_words: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split_words}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(split_words=False)]


_PRE_TOKENIZERS = {
    "default": [_byte_level(split_words=True)],
    "gpt-2": [_byte_level(split_words=True)],
    "smollm": [_DIGITS_ALONE, _byte_level(split_words=True)],
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
    "tekken": _split(_TEKKEN_SPLIT),
}
"""What splits text before merges, by `tokenizer.ggml.pre`."""

_WHOLE_WORDS_FIRST = frozenset(["llama-bpe", "tekken"])
"""Kinds that take a word which is a token as it is, without merging up to it."""


def tokenizer_files(file: GgufFile) -> dict[str, dict[str, Any]]:
    """tokenizer.json, tokenizer_config.json, special_tokens_map.json and generation_config.json.

    Raises:
        ModelError: no tokenizer, or a kind that is not supported, by its name.
    """
    meta = file.metadata
    tokens = meta.get("tokenizer.ggml.tokens")
    kind = meta.get("tokenizer.ggml.model")
    if not tokens or kind is None:
        raise ModelError(f"{file.path.name} holds no tokenizer")
    types = meta.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{file.path.name}: {len(types)} token types for {len(tokens)} tokens")
    if kind == "gpt2":
        model = _byte_level_bpe(file, tokens)
    elif kind == "llama":
        model = _sentencepiece_bpe(file, tokens)
    else:
        raise ModelError(f"{file.path.name}: the tokenizer kind {kind!r} is not supported")
    added = [_added(i, tokens[i], special=t == CONTROL) for i, t in enumerate(types) if t in (CONTROL, USER_DEFINED)]
    if kind == "llama":
        added += [_added(i, tokens[i], special=True) for i, t in enumerate(types) if t == UNKNOWN]
        added.sort(key=lambda token: int(token["id"]))
    named = _named_tokens(meta, tokens)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **model,
        "post_processor": _post_processor(meta, named, default_bos=kind == "llama"),
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.get("llama.context_length"),
        **named,
    }
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "special_tokens_map.json": dict(named),
        "generation_config.json": _generation_config(meta, tokens, types),
    }


def _added(index: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": special}


def _named_tokens(meta: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    """bos_token and the like, as text. The file's keys for unknown and padding are longer."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: meta.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _generation_config(meta: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Every token that ends an answer: the ones the file names, and control tokens known for it."""
    ends = {i for i, token in enumerate(tokens) if types[i] == CONTROL and token in END_OF_TURN}
    for key in ("eos", "eot", "eom"):
        if isinstance(i := meta.get(f"tokenizer.ggml.{key}_token_id"), int) and 0 <= i < len(tokens):
            ends.add(i)
    config: dict[str, Any] = {"eos_token_id": sorted(ends)}
    if (bos := meta.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    return config


def _post_processor(meta: dict[str, Any], named: dict[str, str], *, default_bos: bool) -> dict[str, Any] | None:
    """What `add_special_tokens` adds."""
    front, back = [], []
    if meta.get("tokenizer.ggml.add_bos_token", default_bos) and "bos_token" in named:
        front = [(named["bos_token"], meta["tokenizer.ggml.bos_token_id"])]
    if meta.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named:
        back = [(named["eos_token"], meta["tokenizer.ggml.eos_token_id"])]
    if not front and not back:
        return None

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        def special(token: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": token, "type_id": type_id}}

        middle = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [*(special(t) for t, _ in front), middle, *(special(t) for t, _ in back)]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in front + back},
    }


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    meta = file.metadata
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(f"{file.path.name}: the pre-tokenizer {pre!r} is not supported")
    merges = [merge.split(" ", 1) for merge in meta.get("tokenizer.ggml.merges", [])]
    if any(len(merge) != 2 for merge in merges):
        raise ModelError(f"{file.path.name}: a merge is not two tokens")
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST),
    }


def _sentencepiece_bpe(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(f"{file.path.name}: the tokenizer has no score for each token")
    prefix = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    space = {"String": " "}
    normalizers = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*normalizers, {"type": "Replace", "pattern": space, "content": "▁"}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe(
            tokens,
            merges_of_scores(tokens, scores),
            byte_fallback=True,
            fuse_unk=True,
            unk_token=tokens[unknown] if unknown is not None else None,
        ),
    }


def merges_of_scores(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """The merges that a SentencePiece BPE vocabulary implies: two tokens join to a third, best score first."""
    vocab = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-score, vocab[token], vocab[left], vocab[right], left, right))
    found.sort()
    return [[left, right] for *_, left, right in found]


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
    }
    return {**model, "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
