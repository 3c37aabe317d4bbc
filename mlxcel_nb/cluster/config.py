"""The cluster file: TOML in, `ClusterConfig` out, or every mistake at once with the mend for each.

`check_text` and `parse_config` are pure; `load_config` reads the file and does nothing else. Any thread may call. The
keys stand in `config_keys`, the rules in `config_checks` and `config_mesh`, all of them in docs/configuration.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from mlxcel_nb.cluster import config_checks
from mlxcel_nb.cluster.config_keys import CLUSTER_KEYS, DEFAULT_CLUSTER, parse_port_range
from mlxcel_nb.cluster.config_mesh import Placing
from mlxcel_nb.cluster.config_model import ClusterConfig, Mesh, Mistake, NodeEntry
from mlxcel_nb.cluster.config_reading import read
from mlxcel_nb.errors import ConfigError

__all__ = [
    "DEFAULT_CLUSTER",
    "ClusterConfig",
    "Mesh",
    "Mistake",
    "NodeEntry",
    "check_text",
    "load_config",
    "mistakes_error",
    "parse_config",
    "parse_port_range",
    "read_text",
]

MAX_FILE_BYTES = 4 << 20
"""A cluster file is not read beyond this: a path typed wrongly may be a model."""

MORE = "More may show when these are mended:"


def load_config(path: str | os.PathLike[str]) -> ClusterConfig:
    """The cluster file at `path`.

    Raises:
        ConfigError: it cannot be read, or its mistakes, all of them: the first line counts them, a note for each
            names the node and the mend.
    """
    return parse_config(read_text(path), source=path)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a cluster file.

    Raises:
        ConfigError: absent, unreadable, far too large, or not UTF-8.
    """
    shown = f"cluster file {os.fspath(path)!r}"
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{shown} does not exist", advice="Check the path.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{shown} cannot be read: {reason}", advice="Check the path and who may read it.") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{shown} has more than {MAX_FILE_BYTES} bytes", advice="It is a small file of TOML.")
    try:
        return data.decode("utf-8-sig")  # some editors put a mark in front of UTF-8
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown} is not UTF-8: line {line}", advice="Save it as UTF-8.") from None


def parse_config(text: str, *, source: str | os.PathLike[str]) -> ClusterConfig:
    """The cluster file with this text.

    Args:
        source: the file it is from: errors name it, and paths in it are relative to its folder.

    Raises:
        ConfigError: its mistakes, all of them.
    """
    config, mistakes = check_text(text, source=source)
    if config is None:
        raise mistakes_error(os.fspath(source), mistakes)
    return config


def check_text(text: str, *, source: str | os.PathLike[str]) -> tuple[ClusterConfig | None, list[Mistake]]:
    """The cluster file with this text, or None and what is wrong with it, in the order of the file."""
    reading = read(text)
    mistakes = list(reading.mistakes)
    readable = bool(reading.cluster.values)
    placing = None
    if readable:
        mistakes += config_checks.check(reading.cluster, reading.nodes)
        placing = Placing(reading.cluster, reading.nodes)
        mistakes += placing.mistakes
    if mistakes or placing is None:
        return None, sorted(mistakes, key=lambda mistake: mistake.line or len(text))
    folder = Path(source).parent
    values = {key.name: reading.cluster[key.name] for key in CLUSTER_KEYS}
    for key in ("secret_file", "previous_secret_file"):
        values[key] = _beside(folder, values[key])
    entry_keys = [field.name for field in fields(NodeEntry)]
    nodes = tuple(NodeEntry(**{key: node[key] for key in entry_keys}) for node in reading.nodes)
    return ClusterConfig(**values, nodes=nodes, meshes=placing.meshes), []


def _beside(folder: Path, name: str | None) -> str | None:
    """A path of the file's, from where its reader stands; `~` stays the user's home."""
    return name if name is None or name.startswith("~") else str(folder / name)


def mistakes_error(source: str, mistakes: Sequence[Mistake]) -> ConfigError:
    """One error for all mistakes of `source`. A single one is the error itself.

    Where one of them kept others from being looked for, it says that more may show.
    """
    more = any(mistake.hides for mistake in mistakes)
    if len(mistakes) == 1:
        only = mistakes[0]
        place = f" line {only.line}" if only.line else ""
        where = f"{source}{place}:{f' {only.where}:' if only.where else ''}"
        return ConfigError(f"{where} {only.what}", advice=f"{only.mend} More may show then." if more else only.mend)
    error = ConfigError(f"{source} has {len(mistakes)} mistakes", advice=MORE if more else None)
    for mistake in mistakes:
        error.add_note(str(mistake))
    return error
