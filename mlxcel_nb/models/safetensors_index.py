"""Where each tensor of a model folder lies: file, dtype, shape and byte range. Nothing but headers is read.

Loaders slice by these ranges, so what is said here must be true: sizes are checked against the files' lengths, a shard
that is missing is an error with its name, and an index left over from another layout of the same model is set aside.
May be called from any thread; imports no array library. Folders are not trusted: headers are bounded and validated.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from mlxcel_nb.errors import ModelAbsent, ModelCutShort, ModelError
from mlxcel_nb.plan.elements import ITEM_SIZE

MAX_HEADER = 100_000_000
"""Bytes; the format's own cap on a header, so a garbled length allocates no more than this."""

INDEX_NAME = "model.safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>model.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
_FETCH_AGAIN = "Get the model again, or copy the file again from where it is whole."


class TensorEntry(NamedTuple):
    """One tensor's place. `begin` and `end` are byte offsets in `file` itself, header included."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weight_files(path: str | Path) -> dict[str, TensorEntry]:
    """Every tensor of the model folder `path`, by name.

    Raises:
        ModelError: no weights, or a missing, truncated or malformed file; the message names it.
    """
    folder = Path(path)
    entries: dict[str, TensorEntry] = {}
    for file in _choose_files(folder):
        for name, entry in read_header(file).items():
            if name in entries:
                raise ModelError(
                    f"{folder}: tensor {name} is in both {entries[name].file.name} and {file.name}",
                    advice="Remove the files that do not belong to the model.",
                )
            entries[name] = entry
    return entries


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, checked against its length.

    Raises:
        ModelError: the file cannot be read, is cut short, or is not safetensors.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                raise ModelError(f"{file} is a Git LFS pointer, not weights", advice="Run `git lfs pull` there.")
            if len(prefix) < 8 or (2 <= length <= MAX_HEADER and 8 + length > size):
                raise ModelCutShort(f"{file} is truncated: its header is cut off at {size} bytes", advice=_FETCH_AGAIN)
            if not 2 <= length <= MAX_HEADER:
                raise ModelError(f"{file} is not a safetensors file", advice=_FETCH_AGAIN)
            text = stream.read(length)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise ModelError(f"{file} has a header that is not JSON", advice=_FETCH_AGAIN) from None
    if not isinstance(header, dict):
        raise ModelError(f"{file} has a header that is not a table of tensors", advice=_FETCH_AGAIN)
    header.pop("__metadata__", None)
    base = 8 + length
    entries = {name: _entry(file, base, name, about) for name, about in header.items()}
    needed = max((entry.end for entry in entries.values()), default=base)
    if needed > size:
        raise ModelCutShort(f"{file} is truncated: it has {size} of {needed} bytes", advice=_FETCH_AGAIN)
    return entries


def _entry(file: Path, base: int, name: str, about: Any) -> TensorEntry:
    def bad(why: str) -> ModelError:
        return ModelError(f"{file}: tensor {name} {why}", advice=_FETCH_AGAIN)

    def is_size(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0

    if not isinstance(about, dict):
        raise bad("has no description")
    dtype, shape, offsets = about.get("dtype"), about.get("shape"), about.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise bad(f"has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(is_size, shape)):
        raise bad("has no legal shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise bad("has no legal offsets")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_SIZE[dtype]:
        raise bad(f"has {end - begin} bytes, not what {dtype} {shape} takes")
    return TensorEntry(file, dtype, tuple(shape), base + begin, base + end)


def _choose_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model.

    A complete index decides. One that names absent files is stale when a `model.safetensors` it does not know lies
    beside it, as after converting or re-quantising in place; otherwise the absent file is an error.
    """
    if not folder.is_dir():
        raise ModelAbsent(f"{folder} is not a folder")
    single = folder / "model.safetensors"
    index = folder / INDEX_NAME
    if index.exists():
        weight_map = _read_index(index)
        names = sorted(set(weight_map.values()))
        if names == [single.name] or (single.is_file() and single.name not in names and _broken(folder, weight_map)):
            names = [single.name]
        elif why := _broken(folder, weight_map):
            raise ModelError(why, advice=_FETCH_AGAIN)
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        other = next((p.name for pattern in ("*.bin", "*.pt", "*.npz", "*.gguf") for p in folder.glob(pattern)), None)
        beside = f", only {other}" if other else ""
        raise ModelAbsent(f"{folder} has no model*.safetensors{beside}", advice="Give an MLX or Hugging Face folder.")
    for file in found:
        if match := _SHARD.fullmatch(file.name):
            for number in range(1, int(match["total"]) + 1):
                part = folder / f"{match['stem']}-{number:05d}-of-{match['total']}.safetensors"
                if not part.is_file():
                    raise ModelError(f"{part} is missing: {file.name} is one of its {match['total']} shards",
                                     advice=_FETCH_AGAIN)  # fmt: skip
    return found


def _read_index(index: Path) -> dict[str, str]:
    try:
        data = json.loads(index.read_bytes())
        weight_map = data["weight_map"]
        names = set(weight_map.values())
        legal = bool(names) and all(isinstance(name, str) and name == Path(name).name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        legal = False
    if not legal:
        raise ModelError(f"{index} is not an index of safetensors files", advice=_FETCH_AGAIN)
    return dict(weight_map)


def _broken(folder: Path, weight_map: dict[str, str]) -> str | None:
    """What the index promises and the folder does not hold, as a sentence; None when all is there."""
    headers = {}
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            return f"{folder / name} is missing: {INDEX_NAME} names it"
        headers[name] = read_header(folder / name)
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            return f"{folder / name} has no tensor {tensor}, which {INDEX_NAME} promises"
    return None
