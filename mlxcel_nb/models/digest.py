"""SHA-256 of files and model folders, remembered by size and time of change so that gigabytes are read once.

The memory lies in the cache folder, not beside the files: a model may live where the user cannot write. Any thread
and process may call; a lost or garbled memory only costs reading again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.util.paths import cache_dir

_OTHER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What changes a model's answers besides its weights."""


def file_sha256(path: Path) -> str:
    """Hex digest of the file's content."""
    stat = path.stat()
    key = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    real = os.path.realpath(path)
    memory = cache_dir() / "hashes" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(memory.read_bytes())
        if known["key"] == key and len(known["sha256"]) == 64:
            return str(known["sha256"])
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    with contextlib.suppress(OSError):
        _replace(memory, json.dumps({"key": key, "sha256": digest}))
    return digest


def folder_sha256(folder: str | Path) -> str:
    """Hex digest of a model folder: names and contents of its weights, config, tokenizer and template.

    Two nodes whose folders agree in this run the same model, wherever it lies.

    Raises:
        ModelError: the folder's weights are not whole.
    """
    folder = Path(folder)
    files = {entry.file for entry in weight_files(folder).values()}
    files |= {folder / name for name in _OTHER_FILES if (folder / name).is_file()}
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(f"{file.name}\0{file_sha256(file)}\n".encode())
    return whole.hexdigest()


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as stream:
        stream.write(text)
    Path(stream.name).replace(path)
