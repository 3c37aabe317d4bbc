"""What a model folder holds, from its config and the headers of its weights. No array library is imported.

Any thread; folders are not trusted, and one that is really Python code is refused unless the user asked for it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.chat import chat_templates
from mlxcel_nb.models.digest import folder_sha256
from mlxcel_nb.models.folder import read_json
from mlxcel_nb.models.safetensors_index import weight_files

_KEYS = {
    "layers": ("num_hidden_layers", "n_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "heads": ("num_attention_heads", "n_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
}
"""Names that architectures give the same thing."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A model folder at a glance. Sizes an architecture does not have are 0.

    Args:
        context: most positions the model was made for.
        tied: whether the output layer is the embedding.
        quantization: mlx-lm's table, or None.
        dtypes: bytes of weights by dtype.
        bytes: of all weights.
        wants_code: the Python file or class that the folder needs to run, or None.
    """

    path: Path
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool
    quantization: Mapping[str, Any] | None
    dtypes: Mapping[str, int]
    bytes: int
    tensors: int
    chat_template: bool
    wants_code: str | None

    @cached_property
    def content_hash(self) -> str:
        """Hex SHA-256 of weights, config and tokenizer: equal folders give equal answers. Reads the files once."""
        return folder_sha256(self.path)

    @property
    def precision(self) -> str:
        """Like `4-bit, groups of 32` or `F32`."""
        if self.quantization and "bits" in self.quantization:
            return f"{self.quantization['bits']}-bit, groups of {self.quantization.get('group_size', 64)}"
        return max(self.dtypes, key=lambda dtype: self.dtypes[dtype], default="none")


def model_info(path: str | Path) -> ModelInfo:
    """Read the folder `path`.

    Raises:
        ModelError: no config, or weights that are not whole; the message names the file.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    whole_config = read_json(folder / "config.json")
    if not whole_config:
        raise ModelError(f"{folder} has no config.json", advice="Give an MLX or Hugging Face model folder.")
    text_config = whole_config.get("text_config")
    config = {**whole_config, **text_config} if isinstance(text_config, dict) else whole_config
    tensors = weight_files(folder)
    sizes = {name: _first_number(config, keys) for name, keys in _KEYS.items()}
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]
    sizes["head_dim"] = sizes["head_dim"] or (sizes["hidden"] // sizes["heads"] if sizes["heads"] else 0)
    dtypes: dict[str, int] = {}
    for entry in tensors.values():
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.end - entry.begin
    quantization = whole_config.get("quantization") or whole_config.get("quantization_config")
    has_head = any(name.endswith("lm_head.weight") for name in tensors)
    return ModelInfo(
        path=folder,
        model_type=str(whole_config.get("model_type", "unknown")),
        tied=bool(config.get("tie_word_embeddings", not has_head)),
        quantization=quantization if isinstance(quantization, dict) else None,
        dtypes=dtypes,
        bytes=sum(dtypes.values()),
        tensors=len(tensors),
        chat_template=chat_templates(folder, read_json(folder / "tokenizer_config.json")) is not None,
        wants_code=wanted_code(whole_config),
        **sizes,
    )


def refuse_code(folder: Path, config: Mapping[str, Any] | None = None, *, allow_code: bool = False) -> None:
    """Raise if the model in `folder` is Python code of its own and the user has not allowed that.

    Args:
        config: what its config.json says, if that has been read already.
    """
    if not allow_code and (what := wanted_code(read_json(folder / "config.json") if config is None else config)):
        raise ModelError(
            f"the model in {folder} wants to run its own Python code ({what})",
            advice="If you trust it, allow that with --allow-code, in Python allow_code=True.",
        )


def wanted_code(config: Mapping[str, Any]) -> str | None:
    """The Python code a config asks for: a `model_file`, or an `auto_map` where mlx-lm has no such model itself."""
    if model_file := config.get("model_file"):
        return str(model_file)
    auto_map = config.get("auto_map")
    if isinstance(auto_map, dict) and auto_map and not _is_built_in(str(config.get("model_type", ""))):
        return str(next(iter(auto_map.values())))
    return None


def _is_built_in(model_type: str) -> bool:
    """Whether mlx-lm has this architecture, found without importing it, since that would import MLX."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.origin is None or not model_type.isidentifier():
        return False
    home = Path(spec.origin).parent
    return (home / "models" / f"{model_type}.py").is_file() or model_type in _renamed(home / "utils.py")


def _renamed(source: Path) -> frozenset[str]:
    """Architectures that mlx-lm runs under another's name, from the literal table in its source."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "MODEL_REMAPPING" for t in node.targets
        ):
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def _first_number(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), 0)
