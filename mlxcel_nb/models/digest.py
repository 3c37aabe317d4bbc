"""SHA-256 of files and model folders, remembered by size and times of change so that gigabytes are read once.

The memory lies in the cache folder, not beside the files: a model may live where the user cannot write. Any thread
and process may call; of several that want the same file at once one reads it, and the others wait. A lost or garbled
memory only costs reading again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.util.paths import cache_dir

fcntl: Any
try:
    import fcntl
except ImportError:  # no flock on this platform: several processes may read the same file
    fcntl = None

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
"""What changes a model's answers besides its weights, and Python code of its own."""

_PIECE = 4 << 20
"""Bytes read at once: progress is told, and a stop is noticed, hundreds of times a second."""

TURN_S = 300.0
"""How long to wait for another process that reads the same file; after that, both do."""

_POLL_S = 0.05


def file_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex digest of the file's content.

    Args:
        progress: told between pieces how many bytes have been read, and while another process reads them; what it
            raises ends the reading.
    """
    tell = progress or (lambda _done: None)
    key = _key(path)
    real = os.path.realpath(path)
    memory = cache_dir() / "hashes" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()}.json"
    if known := _remembered(memory, key):
        return known
    with path.open("rb") as stream:
        _wait_turn(stream, tell)
        if known := _remembered(memory, key):
            return known
        digest = _read(stream, tell)
        if _key(path) == key:
            with contextlib.suppress(OSError):  # before others get their turn, so that they find it
                _replace(memory, json.dumps({"key": key, "sha256": digest}))
    return digest


def _key(path: Path) -> list[int]:
    stat = path.stat()
    # Archives give a new file the old one's time and often its inode; the time of its last change nobody can set.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _remembered(memory: Path, key: list[int]) -> str | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(memory.read_bytes())
        if known["key"] == key and len(known["sha256"]) == 64:
            return str(known["sha256"])
    return None


def _wait_turn(stream: BinaryIO, tell: Callable[[int], None]) -> None:
    """Hold the file until it is closed. Where files cannot be held, or not in time, nobody waits."""
    end = time.monotonic() + TURN_S
    while fcntl is not None and time.monotonic() < end:
        try:
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            tell(0)
            time.sleep(_POLL_S)  # the kernel's own wait for a lock has no deadline
        except OSError:  # a file system without locks
            return


def _read(stream: BinaryIO, tell: Callable[[int], None]) -> str:
    whole, done = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_PIECE))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]  # what `open` gives has it
        whole.update(buffer[:count])
        done += count
        tell(done)
    return whole.hexdigest()


def folder_digests(folder: str | Path, progress: Callable[[str, int, int], None] | None = None) -> dict[str, str]:
    """Hex digest of each file that makes a model what it is, by name: weights, config, tokenizer, template, own code.

    Args:
        progress: told the file's name, and how many bytes of all files have been read.

    Raises:
        ModelError: the folder's weights are not whole, or a file cannot be read.
    """
    folder = Path(folder)
    files = {entry.file for entry in weight_files(folder).values()}
    files |= {folder / name for name in (*_OTHER_FILES, *_code(folder)) if (folder / name).is_file()}
    found: dict[str, str] = {}
    before = 0
    try:
        total = sum(file.stat().st_size for file in files)
        for file in sorted(files):

            def tell(done: int, name: str = file.name, before: int = before) -> None:
                if progress is not None:
                    progress(name, before + done, total)

            found[file.name] = file_sha256(file, tell)
            before += file.stat().st_size
    except OSError as error:
        raise ModelError(f"{error.filename or folder} cannot be read: {error.strerror}") from error
    return found


def folder_bytes(folder: str | Path) -> int | None:
    """Bytes of the files that would make a model of `folder`, whole or not; None where there are none."""
    folder = Path(folder)
    files = {folder / name for name in (*_OTHER_FILES, *_code(folder))}
    with contextlib.suppress(OSError):
        files |= set(folder.glob("model*.safetensors"))
    sizes: list[int] = []
    for file in files:
        with contextlib.suppress(OSError):
            sizes.append(file.stat().st_size)
    return sum(sizes) if sizes else None


def _code(folder: Path) -> tuple[str, ...]:
    """The file of Python code that the folder's config names, if it does."""
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        name = json.loads((folder / "config.json").read_bytes()).get("model_file")
        if isinstance(name, str) and Path(name).name == name:
            return (name,)
    return ()


def whole_sha256(digests: Mapping[str, str]) -> str:
    """One hex digest for all of a folder's files, names included."""
    whole = hashlib.sha256()
    for name, digest in sorted(digests.items()):
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.hexdigest()


def folder_sha256(folder: str | Path) -> str:
    """Hex digest of a model folder.

    Two nodes whose folders agree in this run the same model, wherever it lies.

    Raises:
        ModelError: as `folder_digests`.
    """
    return whole_sha256(folder_digests(folder))


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as stream:
        stream.write(text)
    Path(stream.name).replace(path)
