"""Which modules of a model are quantised and how: bits, group size, mode, and overrides of single layers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mlxcel_nb.errors import ModelError

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")

_BY_METHOD = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
}
"""Foreign quantisation methods whose weights MLX reads as they are."""

USUAL = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""Group size and bits of a mode that is named without them."""

AFFINE = [(group, bits) for group in (32, 64, 128) for bits in (1, 2, 3, 4, 5, 6, 8)]
"""What mode affine can be, tried on mlx 0.32."""

_BY_SHAPE = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""Modes with 8-bit scales have one pair of bits and group size each."""


@dataclass(frozen=True)
class Quantisation:
    """How one weight is packed: `bits` a weight, a scale (and in mode affine a bias) for each `group_size` weights."""

    group_size: int
    bits: int
    mode: str = "affine"


def settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantisation table of a config.json; empty when there is none.

    Raises:
        ModelError: a method whose weights would have to be converted first, or an unknown mode.
    """
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    table = config.get("quantization") or config.get("quantization_config") or nested or {}
    if not isinstance(table, Mapping):
        raise ModelError("config.json: quantization is not a table")
    method = table.get("quant_method")
    if method is not None and "mode" not in table:
        if method not in _BY_METHOD:
            raise ModelError(
                f"weights quantised by {method} are not read here",
                advice="Convert the model with mlx_lm.convert; plan --bits 4 tells what it takes then.",
            )
        return {**table, **_BY_METHOD[method]}
    for path, entry in (("quantization", table), *table.items()):
        if isinstance(entry, Mapping) and entry.get("mode", "affine") not in MODES:
            raise ModelError(f"{path}: unknown quantisation mode {entry['mode']!r}; known are {', '.join(MODES)}")
    return table


def of_weight(
    table: Mapping[str, Any], path: str, *, features: int, words: int, groups: int, byte_scales: bool
) -> Quantisation:
    """How the weight at `path` is packed: as its own entry says, else as its shapes do.

    The model's default can be wrong for a layer that an entry does not name, and shapes cannot.

    Args:
        features: input features of the module.
        words, groups: last dimensions of the packed weight and of its scales.
        byte_scales: scales are 8-bit floats, as every mode but affine has them.

    Raises:
        ModelError: the entry contradicts the shapes, or the shapes fit no mode.
    """
    if groups < 1 or features % groups or words * 32 % features:
        raise ModelError(f"{path}: {words} words and {groups} scales do not fit {features} input features")
    group_size, bits = features // groups, words * 32 // features
    mode = _BY_SHAPE.get((bits, group_size)) if byte_scales else "affine"
    entry = table.get(path)
    if isinstance(entry, Mapping):
        claim = (entry.get("group_size", group_size), entry.get("bits", bits), entry.get("mode", mode))
        if claim != (group_size, bits, mode):
            raise ModelError(f"{path}: config.json says group size, bits, mode {claim}, "
                             f"its shapes say {(group_size, bits, mode)}")  # fmt: skip
    if mode is None:
        raise ModelError(f"{path}: no quantisation mode has {bits} bits in groups of {group_size}")
    return Quantisation(group_size, bits, mode)


def said(table: Mapping[str, Any], path: str) -> Quantisation | None:
    """How the config says that the weight at `path` is packed, as MLX reads it; None where it says that it is not.

    An entry of its own stands for itself: what it does not name is MLX's default, and not the model's.
    """
    entry = table.get(path, True)
    if not table or not entry or _left_plain(table, path):
        return None
    return packing(entry if isinstance(entry, Mapping) else table)


def packing(entry: Mapping[str, Any]) -> Quantisation:
    """An entry with what MLX adds to it: mode affine, and the mode's usual group size and bits.

    Raises:
        ModelError: a mode that there is not, or that is not of such bits and groups.
    """
    mode = entry.get("mode", "affine")
    if mode not in USUAL:
        raise ModelError(f"unknown quantisation mode {mode!r}; known are {', '.join(MODES)}")
    group, bits = (
        usual if entry.get(key) is None else entry[key]
        for key, usual in zip(("group_size", "bits"), USUAL[mode], strict=True)
    )
    kinds = AFFINE if mode == "affine" else [USUAL[mode]]
    if any(type(value) is not int for value in (group, bits)) or (group, bits) not in kinds:
        raise ModelError(f"config.json: MLX has no {mode} quantisation of {bits!r} bits in groups of {group!r}")
    return Quantisation(group, bits, mode)


def foreign(table: Mapping[str, Any]) -> bool:
    """Whether others than mlx-lm packed the weights: then its own rules of what stays plain do not hold."""
    return "quant_method" in table


def _left_plain(table: Mapping[str, Any], path: str) -> bool:
    """Whether `modules_to_not_convert` names the module or what it is in, as `model.layers.*.self_attn` does."""
    patterns = table.get("modules_to_not_convert")
    return isinstance(patterns, list) and any(
        fnmatchcase(f".{path}.", f"*.{pattern}.*") for pattern in patterns if isinstance(pattern, str)
    )


def group_sizes(config: Mapping[str, Any], model: Any) -> Callable[[str], int]:
    """What the config says of each weight's quantisation group: path of a module -> its group size, 1 without.

    The files may hold more than it says, so whoever has them asks them; this is for a model that has none yet.
    """
    table = settings(config)
    modules = dict(model.named_modules())

    def group(path: str) -> int:
        packed = said(table, path)
        module = modules.get(path)
        weight = getattr(module, "weight", None) if hasattr(module, "to_quantized") else None
        if weight is None or packed is None or weight.shape[-1] % packed.group_size:
            return 1
        return packed.group_size

    return group
