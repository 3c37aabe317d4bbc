"""The weights that a config.json promises, for a model whose files are not here: shapes and dtypes, and no values.

As mlx-lm's own conversion would write them: a module that can be packed and whose width holds whole groups is packed,
unless the config or the model itself says otherwise. For the MLX thread; nothing is ever computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxcel_nb.models import quantisation
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.models.weights import Source, Weights

STORED = "bfloat16"
"""Dtype of a model whose config names none, as nearly all are published."""


def stored_dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """Dtype of the floating weights as published."""
    text = config.get("text_config")
    for table in (config, text if isinstance(text, Mapping) else {}):
        name = table.get("torch_dtype") or table.get("dtype")
        found = getattr(mx, str(name).removeprefix("torch."), None)
        if isinstance(found, mx.Dtype) and mx.issubdtype(found, mx.floating):
            return found
    return getattr(mx, STORED)


class Imagined(Weights):
    """Weights by the model's own names, from no file: their sizes can be asked for, and they cannot be placed.

    Args:
        model: the whole model.
        target: as for `Weights`.
    """

    def __init__(self, model: Any, skeleton: Any, config: Mapping[str, Any], *, target: mx.Dtype | None) -> None:
        self._model = model
        self._skeleton = skeleton
        self._table = quantisation.settings(config)
        self._target = target
        self._entries = {}
        self.cuts = {}
        self.warnings = []
        self._shapes = {name: tuple(array.shape) for name, array in named_arrays(model)}
        packs_itself = any(name.endswith(".scales") for name in self._shapes)  # and its table tells it how
        self._sources = _sources(model, {} if packs_itself else self._table, stored_dtype(config))


def _sources(model: Any, table: Mapping[str, Any], stored: mx.Dtype) -> dict[str, Source]:
    modules = dict(model.named_modules())
    found: dict[str, Source] = {}

    def add(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        found[name] = Source(mx.zeros(shape, dtype), None)

    for name, array in named_arrays(model):
        floating = mx.issubdtype(array.dtype, mx.floating)
        path, _, leaf = name.rpartition(".")
        packing = _packing(model, modules.get(path), path, table) if leaf == "weight" and floating else None
        if packing is None:
            add(name, tuple(array.shape), stored if floating else array.dtype)
            continue
        *rows, width = array.shape
        groups = width // packing.group_size
        add(name, (*rows, width * packing.bits // 32), mx.uint32)
        add(f"{path}.scales", (*rows, groups), stored if packing.mode == "affine" else mx.uint8)
        if packing.mode == "affine":
            add(f"{path}.biases", (*rows, groups), stored)
    return found


def _packing(model: Any, module: Any, path: str, table: Mapping[str, Any]) -> quantisation.Quantisation | None:
    """How the weight of `module` is packed, or None."""
    if not table or not hasattr(module, "to_quantized"):
        return None
    packed = quantisation.said(table, path)
    predicate = getattr(model, "quant_predicate", None)
    if packed is not None and path not in table and predicate is not None and not quantisation.foreign(table):
        entry = predicate(path, module)
        packed = quantisation.packing(entry) if isinstance(entry, Mapping) else packed if entry else None
    return None if packed is None or module.weight.shape[-1] % packed.group_size else packed


def drop_tied_head(model: Any, config: Mapping[str, Any]) -> None:
    """Have a model drop its head as it would on reading files without one, if its config ties it to the embedding.

    Most models never build such a head; the others look at their files. Hugging Face ties where nothing is said.
    """
    tables = [table for table in (config, config.get("text_config")) if isinstance(table, Mapping)]
    said = [table["tie_word_embeddings"] for table in tables if "tie_word_embeddings" in table]
    arrays = dict(named_arrays(model))
    files = {name: array for name, array in arrays.items() if "lm_head" not in name.split(".")}  # also a text model's
    if len(files) < len(arrays) and hasattr(model, "sanitize") and (not said or said[-1]):
        with contextlib.suppress(KeyError, ValueError, IndexError, AttributeError, TypeError):
            model.sanitize(files)  # of interest is what it does to the model, before it may find something missing
