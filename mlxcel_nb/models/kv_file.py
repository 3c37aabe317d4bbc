"""Saved keys and values of a sequence of tokens: one safetensors file each, of the whole model, however it was split.

Tensors are `tokens` (T,) and, of each layer that keeps any, `layers.N.keys` and `layers.N.values` (H, T, D), H being
all the model's kv-heads. The metadata hold what the file says of itself, as JSON (`about`), and a SHA-256 of that and
of the tensors. A reader makes the header anew from `about` and takes nothing but exactly that header, so a bent one is
noticed whatever is bent; every size is known before anything is read, and nothing in it is ever run.

A file holds what was said, so only its owner may read it. It is written beside its place and moved there when it is
whole. Imports no array library. Any thread may call; the file is not trusted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, NamedTuple, Self

from mlxcel_nb.errors import ConfigError, ModelError
from mlxcel_nb.models.atomic import disk_errors, require_room
from mlxcel_nb.plan.shards import Range
from mlxcel_nb.util.paths import cache_dir

FORMAT = 1
"""Of the file; one of another is not read."""

MAX_LAYERS, MAX_HEADS, MAX_DIM = 4096, 1 << 16, 1 << 16
MAX_TOKENS = 1 << 28
MAX_HEADER = 16 << 20
"""Bytes: the metadata hold the turns of a conversation too."""

DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
"""As MLX and as safetensors name them, and bytes of an element."""

SUFFIX = ".safetensors"
TOKEN_BYTES = 4
_NAME = re.compile(r"\w[\w.-]{0,99}")
_PIECE = 4 << 20

Which = Literal["keys", "values"]
BOTH: tuple[Which, Which] = ("keys", "values")


class KvLayer(NamedTuple):
    """What a layer keeps of each token: `heads` keys of `key_dim` elements, and as many values of `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int

    def dim(self, which: Which) -> int:
        return self.key_dim if which == "keys" else self.value_dim


@dataclass(frozen=True, kw_only=True)
class KvHeader:
    """What a file says of itself.

    Args:
        model: as its user called it.
        model_sha256: of its folder, as `models.digest` takes it.
        architecture: its `model_type`.
        dtype: of keys and values.
        layout: that they were computed in; they are saved whole, so it is for the reader's information alone.
        tokens: how many.
        layers: a row for each of the model's caches; None for one that keeps nothing.
        created: seconds since 1970.
        messages: the turns of a conversation that belong to it.
    """

    model: str
    model_sha256: str
    architecture: str
    dtype: str
    layout: str
    tokens: int
    layers: tuple[KvLayer | None, ...]
    created: float
    messages: tuple[dict[str, str], ...] = dataclasses.field(default=(), repr=False)

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        per_token = sum(each.heads * (each.key_dim + each.value_dim) for each in self.layers if each)
        return self.tokens * (TOKEN_BYTES + per_token * DTYPES[self.dtype][1])

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> KvHeader:
        """The inverse; raises ValueError for what no writer would write."""
        told = json.loads(text)
        if not isinstance(told, dict) or told.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        if told.keys() != {each.name for each in dataclasses.fields(cls)}:
            raise ValueError("its description has other fields")
        layers, messages = told.pop("layers"), told.pop("messages")
        if not isinstance(layers, list) or not 1 <= len(layers) <= MAX_LAYERS or not isinstance(messages, list):
            raise ValueError("its layers or turns are none")
        header = cls(
            layers=tuple(None if each is None else _layer(each) for each in layers),
            messages=tuple(_message(each) for each in messages),
            **told,
        )
        words = (header.model, header.model_sha256, header.architecture, header.dtype, header.layout)
        if not all(isinstance(word, str) for word in words) or header.dtype not in DTYPES:
            raise ValueError("its description cannot be read")
        if type(header.tokens) is not int or not 1 <= header.tokens <= MAX_TOKENS or not any(header.layers):
            raise ValueError("it has no tokens")
        if type(header.created) not in (int, float) or not math.isfinite(header.created):
            raise ValueError("its date is none")
        return header


def _layer(told: Any) -> KvLayer:
    if not isinstance(told, list) or len(told) != 3 or not all(type(each) is int for each in told):
        raise ValueError("a layer of it cannot be read")
    layer = KvLayer(*told)
    if not (1 <= layer.heads <= MAX_HEADS and 1 <= layer.key_dim <= MAX_DIM and 1 <= layer.value_dim <= MAX_DIM):
        raise ValueError("a layer of it is of a size that there is not")
    return layer


def _message(told: Any) -> dict[str, str]:
    if not isinstance(told, dict) or not all(isinstance(each, str) for pair in told.items() for each in pair):
        raise ValueError("a turn of its conversation cannot be read")
    return told


class _Place(NamedTuple):
    """Where a tensor lies: bytes from the file's first on."""

    begin: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Map:
    """The bytes of a file's beginning, and where its tensors are."""

    lead: bytes
    places: dict[tuple[int, Which], _Place]
    tokens: int
    end: int


def _map(header: KvHeader, sha256: str) -> _Map:
    """The file that `header` describes."""
    kind, size = DTYPES[header.dtype]
    about: dict[str, Any] = {"__metadata__": {"about": header.to_json(), "sha256": sha256}}
    offset = 0
    places = {}

    def add(name: str, dtype: str, shape: tuple[int, ...], itemsize: int) -> _Place:
        nonlocal offset
        place = _Place(offset, shape)
        offset += math.prod(shape) * itemsize
        about[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place.begin, offset]}
        return place

    add("tokens", "U32", (header.tokens,), TOKEN_BYTES)
    for index, layer in enumerate(header.layers):
        for which in BOTH if layer else ():
            assert layer is not None
            shape = (layer.heads, header.tokens, layer.dim(which))
            places[index, which] = add(f"layers.{index}.{which}", kind, shape, size)
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    lead = struct.pack("<Q", len(text)) + text
    return _Map(lead, {key: place._replace(begin=base + place.begin) for key, place in places.items()}, base,
                base + offset)  # fmt: skip


class _Parts:
    """Where the elements of some heads and tokens lie in a file: a run for each head."""

    def __init__(self, header: KvHeader, places: _Map) -> None:
        self._header = header
        self._places = places

    def runs(self, layer: int, which: Which, heads: Range, tokens: Range) -> Iterator[tuple[int, int]]:
        """(first byte, bytes) of each head's tokens."""
        begin, (count, length, dim) = self._places.places[layer, which]
        assert 0 <= heads[0] < heads[1] <= count and 0 <= tokens[0] < tokens[1] <= length
        width = dim * DTYPES[self._header.dtype][1]
        for head in range(*heads):
            yield begin + (head * length + tokens[0]) * width, (tokens[1] - tokens[0]) * width


class KvWriter:
    """A file while it is written; use as a context manager. Without `finish` nothing is left of it.

    Args:
        path: where it is to be; what is there is replaced by the whole new one.

    Raises:
        ModelError: no room; how much is needed is said.
    """

    def __init__(self, path: Path, header: KvHeader, tokens: Sequence[int]) -> None:
        assert len(tokens) == header.tokens
        self._path, self._header = path, header
        self._map = _map(header, "0" * 64)
        self._parts = _Parts(header, self._map)
        with disk_errors(path.parent, self._map.end):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_room(path.parent, self._map.end)
            handle, name = tempfile.mkstemp(prefix=f".{path.stem}.saving-", dir=path.parent)  # of mode 0600
            self._scratch, self._stream = Path(name), os.fdopen(handle, "w+b")
        try:
            with disk_errors(path.parent, self._map.end):
                self._stream.write(self._map.lead)
                self._stream.write(struct.pack(f"<{len(tokens)}I", *tokens))
        except BaseException:
            self._discard()
            raise

    def write(self, layer: int, which: Which, heads: Range, tokens: Range, data: bytes | memoryview) -> None:
        """Put elements of some heads and tokens, (heads, tokens, D), where they belong.

        Raises:
            ModelError: the disk is full. ValueError: `data` is of another size.
        """
        view, at = memoryview(data).cast("B"), 0
        runs = list(self._parts.runs(layer, which, heads, tokens))
        if view.nbytes != sum(size for _, size in runs):
            raise ValueError(f"{view.nbytes} bytes of {which} where {sum(size for _, size in runs)} belong")
        with disk_errors(self._path.parent, self._map.end):
            for begin, size in runs:
                self._stream.seek(begin)
                self._stream.write(view[at : at + size])
                at += size

    def finish(self) -> None:
        """It is whole: seal it, and put it in its place.

        Raises:
            ModelError: the disk is full.
        """
        with disk_errors(self._path.parent, self._map.end):
            self._stream.flush()
            if os.fstat(self._stream.fileno()).st_size != self._map.end:
                raise ValueError("the last of its tensors has not been written")
            sealed = _map(self._header, _digest(self._stream, self._header, self._map))
            assert len(sealed.lead) == len(self._map.lead)
            self._stream.seek(0)
            self._stream.write(sealed.lead)
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._scratch.replace(self._path)

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # of a full disk: closing writes what is left
            self._stream.close()
        self._scratch.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._discard()


class KvReader:
    """A file that has been checked; use as a context manager.

    Attributes:
        header: what it says of itself.

    Raises:
        ModelError: it is not there, cut short, bent, or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._stream = path.open("rb")
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self.header, self._map = _read_header(self._stream, path)
            self._parts = _Parts(self.header, self._map)
            if _map(self.header, _digest(self._stream, self.header, self._map)).lead != self._map.lead:
                raise _bent(path, "its content is not what was written")
        except BaseException:
            self._stream.close()
            raise

    def tokens(self) -> list[int]:
        self._stream.seek(self._map.tokens)
        count = self.header.tokens
        return list(struct.unpack(f"<{count}I", self._stream.read(TOKEN_BYTES * count)))

    def read(self, layer: int, which: Which, heads: Range, tokens: Range) -> bytes:
        """Elements of some heads and tokens, (heads, tokens, D)."""
        found = []
        for begin, size in self._parts.runs(layer, which, heads, tokens):
            self._stream.seek(begin)
            found.append(self._stream.read(size))
            if len(found[-1]) != size:
                raise _bent(self.path, "it ends before it should")
        return b"".join(found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()


def _read_header(stream: BinaryIO, path: Path) -> tuple[KvHeader, _Map]:
    """What the file at `path` says of itself, when its header and its length agree with it."""
    size = os.fstat(stream.fileno()).st_size
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= MAX_HEADER or 8 + length > size:
        raise _bent(path, "it has no header")
    try:
        told = json.loads(text := stream.read(length))["__metadata__"]
        header, sha256 = KvHeader.from_json(told["about"]), told["sha256"]
        if not isinstance(sha256, str):
            raise ValueError("its checksum is none")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = str(error) if type(error) is ValueError else "its header cannot be read"
        raise _bent(path, why) from None
    places = _map(header, sha256)
    if places.lead != struct.pack("<Q", length) + text:
        raise _bent(path, "its header is not what was written")
    if places.end != size:
        raise _bent(path, f"it has {size} of {places.end} bytes")
    return header, places


def _digest(stream: BinaryIO, header: KvHeader, places: _Map) -> str:
    """Of what the header says and of all tensors."""
    whole = hashlib.sha256(header.to_json().encode())
    stream.seek(len(places.lead))
    while piece := stream.read(_PIECE):
        whole.update(piece)
    return whole.hexdigest()


def _bent(path: Path, why: str) -> ModelError:
    return ModelError(f"{path} is no whole file of saved keys and values: {why}", advice="Save it again.")


# ---------------------------------------------------------------------------------------------- names and places


@dataclass(frozen=True)
class SavedKv:
    """A file by its name. `header` is None where it cannot be read, and `problem` says why."""

    name: str
    path: Path
    nbytes: int
    header: KvHeader | None
    problem: str = ""


def saved_dir() -> Path:
    """Where they lie."""
    return cache_dir() / "kv"


def path_of(name: str) -> Path:
    """The file of that name, which need not be there.

    Raises:
        ConfigError: no file can have that name.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r:.120} is no name for saved keys and values", advice="Use letters, digits, dots and dashes."
        )
    return saved_dir() / f"{name}{SUFFIX}"


def saved(name: str) -> Path:
    """The file of that name, which is there.

    Raises:
        ModelError: it is not; those that are there are named. ConfigError: as of `path_of`.
    """
    path = path_of(name)
    if not path.is_file():
        known = ", ".join(each.name for each in list_saved())
        raise ModelError(f"nothing is saved as {name}", advice=f"There is {known}." if known else "Save it first.")
    return path


def list_saved() -> list[SavedKv]:
    """All that are there, by name. Only headers are read."""
    found = []
    for path in sorted(saved_dir().glob(f"*{SUFFIX}")):
        if path.name.startswith("."):
            continue
        try:
            with path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                found.append(SavedKv(path.stem, path, size, _read_header(stream, path)[0]))
        except FileNotFoundError:  # removed meanwhile
            continue
        except (OSError, ModelError) as error:
            found.append(SavedKv(path.stem, path, 0, None, str(error)))
    return found


def remove(name: str) -> int:
    """Delete one; bytes that are free again.

    Raises:
        ModelError: there is none of that name, or it cannot be removed.
    """
    path = saved(name)
    try:
        size = path.stat().st_size
        path.unlink()
    except OSError as error:
        raise ModelError(f"{path} cannot be removed: {error.strerror}") from None
    return size
