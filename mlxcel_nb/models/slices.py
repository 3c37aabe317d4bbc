"""Reads a rectangle of a tensor from its file straight into the memory of an MLX array.

Only the bytes asked for leave the disk, and no second copy is made: a node's resident growth is its share, and while
it is converted a piece more. For the MLX thread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import mlx.core as mx
import numpy as np

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.safetensors_index import TensorEntry
from mlxcel_nb.plan.elements import ITEM_SIZE
from mlxcel_nb.plan.shards import Range

KINDS = {
    "F32": (mx.float32, mx.float32),
    "F16": (mx.uint16, mx.float16),
    "BF16": (mx.uint16, mx.bfloat16),
    "F8_E4M3": (mx.uint8, mx.uint8),
    "F8_E5M2": (mx.uint8, mx.uint8),
    "F8_E8M0": (mx.uint8, mx.uint8),
    "BOOL": (mx.uint8, mx.bool_),
    "U8": (mx.uint8, mx.uint8),
    "U16": (mx.uint16, mx.uint16),
    "U32": (mx.uint32, mx.uint32),
    "U64": (mx.uint64, mx.uint64),
    "I8": (mx.int8, mx.int8),
    "I16": (mx.int16, mx.int16),
    "I32": (mx.int32, mx.int32),
    "I64": (mx.int64, mx.int64),
}
"""What NumPy is shown (it has no bfloat16), and what MLX makes of the same bytes; MLX keeps 8-bit floats as bytes."""

BLOCK = 4 << 20
"""Bytes read at once where columns are picked out of whole rows."""

GAP = 4 << 10
"""Bytes between two runs that are worth a read for each: a page, the least that a disk gives."""

PIECE = 1 << 20
"""Bytes converted at once."""

_STORED = {mx.float32: mx.float32, mx.float16: mx.uint16, mx.bfloat16: mx.uint16}
"""What may be converted to, and what NumPy is shown of it."""


class SliceReader:
    """Open weight files, until the `with` block ends.

    Args:
        check: called between reads; what it raises ends the reading.
    """

    def __init__(self, check: Callable[[], None] | None = None) -> None:
        self._files: dict[str, int] = {}
        self._check = check or (lambda: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def read(
        self,
        entry: TensorEntry,
        axis: int = 0,
        ranges: Sequence[Range] | None = None,
        *,
        dtype: mx.Dtype | None = None,
    ) -> Any:
        """The `ranges` of `entry` along `axis`, one after the other, as an evaluated MLX array.

        Args:
            dtype: what floating numbers are converted to; None keeps the file's own.

        Raises:
            ModelError: the file ends early, cannot be read, or holds a dtype MLX does not have.
        """
        if entry.dtype not in KINDS:
            raise ModelError(f"{entry.file.name}: MLX has no dtype {entry.dtype}")
        storage, own = KINDS[entry.dtype]
        shape = list(entry.shape)
        if shape and ranges is not None:
            shape[axis] = sum(stop - start for start, stop in ranges)
        convert = dtype is not None and dtype != own and mx.issubdtype(own, mx.floating)
        dtype = dtype if dtype is not None and convert else own
        storage = _STORED[dtype] if convert else storage
        array = mx.zeros(shape, storage)
        mx.eval(array)
        view = np.array(array, copy=False)
        if view.size:
            if convert:
                self._convert(entry, axis, ranges, view, dtype)
            elif shape == list(entry.shape):
                self._fill(entry, entry.begin, view.reshape(-1).view(np.uint8))
            else:
                self._rectangle(entry, axis, ranges or (), view)
        del view
        return array if storage == dtype else array.view(dtype)

    def _convert(
        self, entry: TensorEntry, axis: int, ranges: Sequence[Range] | None, view: Any, dtype: mx.Dtype
    ) -> None:
        """Fill `view` with numbers of `dtype`, some rows at a time, so that both kinds are never there in full."""
        if not entry.shape:
            view[...] = np.array(self.read(entry).astype(dtype).view(_STORED[dtype]))
            return
        rows = [(0, entry.shape[0])]
        if axis == 0 and ranges is not None:
            rows, ranges = list(ranges), None
        size = max(1, (entry.end - entry.begin) // entry.shape[0])  # of a row, in bytes
        step, done = max(1, PIECE // size), 0
        if size > PIECE and len(entry.shape) > 1:  # a row is a whole expert
            for row in (row for first, end in rows for row in range(first, end)):
                begin = entry.begin + row * size
                inner = entry._replace(shape=entry.shape[1:], begin=begin, end=begin + size)
                self._convert(inner, axis - 1, ranges, view[done], dtype)
                done += 1
            return
        for first, end in rows:
            for top in range(first, end, step):
                bottom = min(end, top + step)
                piece = entry._replace(
                    shape=(bottom - top, *entry.shape[1:]),
                    begin=entry.begin + top * size,
                    end=entry.begin + bottom * size,
                )
                converted = self.read(piece, axis, ranges).astype(dtype).view(_STORED[dtype])
                view[done : done + bottom - top] = np.array(converted, copy=False)
                done += bottom - top

    def _rectangle(self, entry: TensorEntry, axis: int, ranges: Sequence[Range], view: Any) -> None:
        """Fill `view` with runs that lie together in the file, or with columns picked out of whole rows."""
        outer, length = math.prod(entry.shape[:axis]), entry.shape[axis]
        run = math.prod(entry.shape[axis + 1 :]) * ITEM_SIZE[entry.dtype]  # bytes of one element along the axis
        target = view.reshape(outer, -1).view(np.uint8)
        left_out = run * (length - sum(stop - start for start, stop in ranges))
        if outer == 1 or run * length > BLOCK or left_out >= GAP * len(ranges):
            for row in range(outer):
                done = 0
                for start, stop in ranges:
                    size = (stop - start) * run
                    offset = entry.begin + (row * length + start) * run
                    self._fill(entry, offset, target[row, done : done + size])
                    done += size
            return
        block = np.empty((max(1, min(outer, BLOCK // (length * run))), length * run), np.uint8)
        for top in range(0, outer, len(block)):
            part = block[: min(len(block), outer - top)]
            self._fill(entry, entry.begin + top * length * run, part.reshape(-1))
            done = 0
            for start, stop in ranges:
                size = (stop - start) * run
                target[top : top + len(part), done : done + size] = part[:, start * run : stop * run]
                done += size

    def _fill(self, entry: TensorEntry, offset: int, target: Any) -> None:
        name = str(entry.file)
        try:
            if name not in self._files:
                self._files[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            done = 0
            while done < len(target):
                self._check()
                count = os.preadv(self._files[name], [target[done : done + (64 << 20)]], offset + done)
                if count == 0:
                    raise ModelError(f"{entry.file} is truncated: it ends at {offset + done} bytes",
                                     advice="Get the model again.")  # fmt: skip
                done += count
        except OSError as error:
            raise ModelError(f"{entry.file} cannot be read: {error.strerror}") from error
