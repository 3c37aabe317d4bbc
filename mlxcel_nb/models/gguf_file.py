"""The header of a GGUF file: metadata, and each tensor's name, shape, type and byte range.

The format (versions 2 and 3) is that of the ggml project's specification. Files are not trusted: every length is
checked against the file before it is used, because the array library maps the file and would die by a signal where a
truncated one ends. May be called from any thread; reads no tensor data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlxcel_nb.errors import ModelError

MAX_DEPTH = 2
"""Nesting of metadata arrays; files in use have one level."""

MAX_ITEMS = 1 << 24
"""Most metadata keys, tensors or array items: 60 times the largest vocabulary."""


class TensorType(NamedTuple):
    """How a tensor's numbers are packed: `block` numbers in `size` bytes."""

    name: str
    block: int
    size: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}
"""By the number in the file; from the specification's table of types."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """One tensor. `shape` is rows first, as array libraries count; `begin` and `end` are offsets in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """What a file's header says."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: str | Path) -> GgufFile:
    """The header of `path`.

    Raises:
        ModelError: the file cannot be read, is truncated, or is not GGUF.
    """
    path = Path(path)
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(path, data).header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:  # mmap of an empty file
        raise ModelError(f"{path} is empty", advice="Get the file again.") from None


class _Cursor:
    """Reads forward through the header of one file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0

    def header(self) -> GgufFile:
        if self.take(4) != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        version = self.number("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported", advice="Versions 2 and 3 are.")
        n_tensors, n_keys = self.count(), self.count()
        metadata = {}
        for _ in range(n_keys):
            key = self.string()
            metadata[key] = self.value(self.number("<I"), 0)
        infos = []
        for _ in range(n_tensors):
            name = self.string()
            dims = tuple(self.number("<Q") for _ in range(self.bounded(self.number("<I"), 8, "dimensions")))
            infos.append((name, dims, self.number("<I"), self.number("<Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ModelError(f"{self.path}: alignment {alignment!r} is not legal")
        base = -(-self.at // alignment) * alignment
        tensors = {name: self.tensor(base, name, dims, kind, offset) for name, dims, kind, offset in infos}
        return GgufFile(path=self.path, metadata=metadata, tensors=tensors)

    def tensor(self, base: int, name: str, dims: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in TENSOR_TYPES:
            raise ModelError(f"{self.path}: tensor {name} has the unknown quantisation number {kind}")
        packing = TENSOR_TYPES[kind]
        if dims and dims[0] % packing.block:
            raise ModelError(f"{self.path}: tensor {name} has rows of {dims[0]}, not whole {packing.name} blocks")
        begin = base + offset
        end = begin + math.prod(dims) // packing.block * packing.size
        if end > len(self.data):
            raise ModelError(
                f"{self.path} is truncated: {name} ends at byte {end} of {len(self.data)}", advice="Get the file again."
            )
        return GgufTensor(name=name, shape=dims[::-1], type=packing.name, begin=begin, end=end)

    def take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise ModelError(f"{self.path} is truncated: its header is cut off", advice="Get the file again.")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def bounded(self, value: int, most: int, what: str) -> int:
        if value > most:
            raise ModelError(f"{self.path}: {value} {what} are more than a GGUF file has")
        return value

    def count(self) -> int:
        return self.bounded(self.number("<Q"), MAX_ITEMS, "entries")

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth == MAX_DEPTH:
            raise ModelError(f"{self.path}: metadata of type {kind} at depth {depth} is not legal")
        item, count = self.number("<I"), self.count()
        if item in _SCALARS:
            form = _SCALARS[item][1]
            return list(struct.unpack(f"<{count}{form}", self.take(count * struct.calcsize("<" + form))))
        return [self.value(item, depth + 1) for _ in range(count)]
