"""From names in weight files to arrays in a model: found, checked, cut, converted, put in place. For the MLX thread.

A model's `sanitize` renames and reshapes what files hold. It is run over lazy arrays: those it hands through are
known by identity and read in slices; only what it computes anew goes through MLX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcel_nb.errors import ConfigError, ModelError
from mlxcel_nb.models.quantisation import Quantisation, of_weight
from mlxcel_nb.models.safetensors_index import TensorEntry
from mlxcel_nb.models.slices import KINDS, PIECE, SliceReader
from mlxcel_nb.models.stages import Skeleton, named_arrays
from mlxcel_nb.plan.cuts import Cut
from mlxcel_nb.plan.shards import Range

_APART = "Its weights and its config.json are not of one model: get it again."


@dataclass(frozen=True)
class Source:
    """Where a weight comes from: a tensor as it lies in a file, or (entry None) an array that sanitize computed."""

    array: Any
    entry: TensorEntry | None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def floating(self) -> bool:
        return bool(mx.issubdtype(self.array.dtype, mx.floating))

    @property
    def place(self) -> str:
        return self.entry.file.name if self.entry else "its files"


class Weights:
    """The weights of one model folder, on their way into one part of one model.

    Args:
        model: the whole model, not pruned yet.
        entries: the tensors of its files.
        table: the quantisation settings of its config.
        target: dtype of floating weights, which also undoes quantisation; None keeps what the files hold.
    """

    def __init__(
        self,
        model: Any,
        skeleton: Skeleton | None,
        entries: Mapping[str, TensorEntry],
        table: Mapping[str, Any],
        *,
        target: mx.Dtype | None,
    ) -> None:
        self._model = model
        self._skeleton = skeleton
        self._table = table
        self._target = target
        self.cuts: dict[str, Cut] = {}
        self.warnings: list[str] = []
        self._entries = entries
        self._sources = _sanitised(model, entries)
        # Now, since a model may drop its head when the files have none (RecurrentGemma).
        self._shapes = {name: tuple(array.shape) for name, array in named_arrays(model)}
        if skeleton is not None:
            skeleton.look()
        if skeleton is not None and skeleton.tied:
            for name in [n for n in self._sources if n.startswith("lm_head.") and n not in self._shapes]:
                del self._sources[name]
        self._check_names()

    def _check_names(self) -> None:
        """Every tensor of the files has a place in the model, as the model has one for each of its own."""
        for name, source in self._sources.items():
            path, _, leaf = name.rpartition(".")
            packed = leaf in ("scales", "biases") and f"{path}.scales" in self._sources
            if name not in self._shapes and not (packed and f"{path}.weight" in self._shapes):
                what = f"{source.place} holds {name}, which a model of this config.json does not have"
                raise ModelError(what, advice=_APART)
        for name, shape in self._shapes.items():
            found = self._sources.get(name)
            if found is None:
                raise ModelError(f"tensor {name} is in none of the model's files", advice="Get the model again.")
            if self._packing(name) is None and found.shape != shape:
                what = f"{found.place}: tensor {name} has shape {list(found.shape)}, config.json says {list(shape)}"
                raise ModelError(what, advice=_APART)

    def _packing(self, name: str) -> Quantisation | None:
        """How a weight is quantised in the files, or None."""
        path, _, leaf = name.rpartition(".")
        scales = self._sources.get(f"{path}.scales")
        if leaf != "weight" or scales is None or f"{path}.scales" in self._shapes:  # its own arithmetic has them
            return None
        weight, full = self._sources[name], self._shapes[name]
        if weight.shape[:-1] != full[:-1] or scales.shape[:-1] != full[:-1]:
            raise ModelError(
                f"{weight.place}: tensor {name} and its scales have shapes {list(weight.shape)} and "
                f"{list(scales.shape)}, config.json says {list(full)}", advice=_APART,
            )  # fmt: skip
        packing = of_weight(
            self._table, path, features=full[-1], words=weight.shape[-1], groups=scales.shape[-1],
            byte_scales=not scales.floating,
        )  # fmt: skip
        if packing.mode == "affine" and f"{path}.biases" not in self._sources:
            raise ModelError(f"tensor {path}.biases is in none of the model's files", advice="Get the model again.")
        return packing

    def group(self, path: str) -> int:
        """The quantisation group of the weight of the module at `path`, 1 where it is not packed."""
        packing = self._packing(f"{path}.weight") if f"{path}.weight" in self._shapes else None
        return packing.group_size if packing else 1

    def _cut_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight's share, in features rather than packed words."""
        whole = self._shapes[name]
        return self.cuts[name].shape(whole) if name in self.cuts else whole

    def size(self, name: str) -> int:
        """Bytes the share of `name` takes once it is in place."""
        count = math.prod(self._cut_shape(name))
        packing = self._packing(name)
        if packing is not None and self._target is None:
            path = name.rpartition(".")[0]
            sides = [
                self._sources[f"{path}.{side}"] for side in ("scales", "biases") if f"{path}.{side}" in self._sources
            ]
            per_group = sum(source.array.dtype.size for source in sides)
            return count * packing.bits // 8 + count // packing.group_size * per_group
        dtype = self._dtype(name)
        return count * dtype.size

    def extra(self, name: str) -> int:
        """Bytes that placing `name` takes for a moment, beside its own."""
        if self._packing(name) is not None and self._target is not None:
            return self.size(name) // 2
        source = self._sources[name]
        if source.entry is None:  # computed whole, then cut
            return self.size(name)
        return 0 if source.array.dtype == self._dtype(name) else 4 * PIECE

    def _dtype(self, name: str) -> mx.Dtype:
        source = self._sources[name]
        if self._target is not None and (source.floating or self._packing(name) is not None):
            return self._target
        return source.array.dtype

    def activations(self, names: tuple[str, ...]) -> str:
        """Dtype of what flows between layers: that of an unquantised floating weight among `names`."""
        if self._target is not None:
            return _name(self._target)
        for name in names:
            if self._sources[name].floating:
                return _name(self._sources[name].array.dtype)
        return "float32"

    def place(self, name: str, reader: SliceReader) -> None:
        """Read the share of `name` and put it into the model, evaluated."""
        path, _, _ = name.rpartition(".")
        packing = self._packing(name)
        if packing is None:
            self._put({name: self._converted(self._read(name, reader))})
        elif self._target is not None:
            self._put({name: self._unpacked(path, packing, reader)})
        else:
            self._quantise_module(path, packing)
            sides = ("weight", "scales", "biases") if packing.mode == "affine" else ("weight", "scales")
            self._put({f"{path}.{side}": self._read(f"{path}.{side}", reader, packing) for side in sides})

    def _put(self, arrays: dict[str, Any]) -> None:
        mx.eval(*arrays.values())
        self._model.load_weights(list(arrays.items()), strict=False)

    def _converted(self, array: Any) -> Any:
        if self._target is not None and mx.issubdtype(array.dtype, mx.floating):
            return array.astype(self._target)
        return array

    def _unpacked(self, path: str, packing: Quantisation, reader: SliceReader) -> Any:
        """The share of a quantised weight as plain numbers."""
        weight = self._read(f"{path}.weight", reader, packing)
        scales = self._converted(self._read(f"{path}.scales", reader, packing))
        biases = None
        if packing.mode == "affine":
            biases = self._converted(self._read(f"{path}.biases", reader, packing))
        return mx.dequantize(
            weight, scales, biases, group_size=packing.group_size, bits=packing.bits, mode=packing.mode,
            dtype=self._target,
        )  # fmt: skip

    def _quantise_module(self, path: str, packing: Quantisation) -> None:
        """Put mlx's quantised module where the plain one is; its weights, random until then, are replaced at once."""
        parent, _, key = path.rpartition(".")
        modules = dict(self._model.named_modules())
        module = modules[path]
        if not hasattr(module, "to_quantized"):
            raise ModelError(f"{path} is quantised in the files, but a {type(module).__name__} cannot be")
        modules[parent][key] = module.to_quantized(packing.group_size, packing.bits, packing.mode)

    def _read(self, name: str, reader: SliceReader, packing: Quantisation | None = None) -> Any:
        """The rank's share of one tensor as it lies in the files."""
        source = self._sources[name]
        path, _, leaf = name.rpartition(".")
        cut = self.cuts.get(f"{path}.weight" if packing is not None else name)
        if cut is None:
            return reader.read(source.entry, dtype=self._target) if source.entry else source.array
        ranges = cut.ranges
        if packing is not None and cut.axis == source.array.ndim - 1:
            ranges = _packed(path, leaf, ranges, packing)
        if source.entry:
            return reader.read(source.entry, cut.axis, ranges, dtype=self._target)
        parts = [source.array[(slice(None),) * cut.axis + (slice(start, stop),)] for start, stop in ranges]
        return mx.contiguous(parts[0]) if len(parts) == 1 else mx.concatenate(parts, cut.axis)

    def compare_tied_head(self, reader: SliceReader) -> None:
        """Warn when the files hold a head of their own although the config ties it to the embedding."""
        if self._skeleton is None or not self._skeleton.tied or "lm_head.weight" not in self._entries:
            return
        head = self._entries["lm_head.weight"]
        table = self._sources[f"{self._skeleton.embedding_path}.weight"].entry
        if table is None or not _equal(head, table, reader):
            self.warnings.append(
                f"{head.file.name} holds an lm_head that differs from the embedding, but config.json says "
                "tie_word_embeddings: the embedding is used"
            )


def _packed(path: str, leaf: str, ranges: tuple[Range, ...], packing: Quantisation) -> tuple[Range, ...]:
    """Columns of a quantised weight, counted in features, as words of it or as its groups."""
    for start, stop in ranges:
        if start % packing.group_size or stop % packing.group_size:
            raise ConfigError(f"{path}: columns {start} to {stop} cut a quantisation group of {packing.group_size}")
    if leaf == "weight":
        return tuple((start * packing.bits // 32, stop * packing.bits // 32) for start, stop in ranges)
    return tuple((start // packing.group_size, stop // packing.group_size) for start, stop in ranges)


def _equal(one: TensorEntry, other: TensorEntry, reader: SliceReader) -> bool:
    """Whether two tensors hold the same bytes, a few MiB at a time."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    rows = one.shape[0]
    step = max(1, (4 << 20) * rows // max(1, one.end - one.begin))
    for top in range(0, rows, step):
        bottom = min(rows, top + step)
        if not mx.array_equal(reader.read(one, 0, [(top, bottom)]), reader.read(other, 0, [(top, bottom)])).item():
            return False
    return True


def _sanitised(model: Any, entries: Mapping[str, TensorEntry]) -> dict[str, Source]:
    """What the model's own `sanitize` makes of its files, by the model's names."""
    arrays: dict[str, Any] = {}
    for file in sorted({entry.file for entry in entries.values()}):
        try:
            loaded = mx.load(str(file))
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{file} cannot be read by MLX: {error}") from error
        assert isinstance(loaded, dict)
        arrays.update((name, array) for name, array in loaded.items() if name in entries)
    origin = {id(array): entries[name] for name, array in arrays.items()}
    result = dict(arrays)
    if hasattr(model, "sanitize"):
        try:
            result = model.sanitize(result)
        except (KeyError, ValueError, IndexError) as error:
            raise ModelError(
                f"the model's files do not fit its architecture: {type(error).__name__} {error}"
            ) from error
    sources = {}
    for name, array in result.items():
        entry = origin.get(id(array))
        sources[name] = Source(array, entry if entry is None or entry.dtype in KINDS else None)
    # An id stays true only while its array lives; `result` may have dropped some of them.
    del arrays
    return sources


def _name(dtype: mx.Dtype) -> str:
    """MLX's own name: "float32"."""
    return str(dtype).rpartition(".")[2]
