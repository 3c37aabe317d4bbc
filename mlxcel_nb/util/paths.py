"""Where things live on a user's disk, and how large they are. Nothing is created here."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """Folder for fetched models: `MLXCEL_NB_CACHE`, or the platform's user cache."""
    if explicit := os.environ.get("MLXCEL_NB_CACHE"):
        return Path(explicit).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "mlxcel_nb"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlxcel_nb"
    return Path.home() / ".cache" / "mlxcel_nb"


def runtime_dir() -> Path:
    """Folder for what lives only as long as a cluster: private profiles, connection files, logs."""
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(base) / "mlxcel_nb"
    return cache_dir() / "run"


def sizes_below(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files below `folder` and their bytes; what another process removes meanwhile is passed over.

    `Path.rglob` raises for a folder that vanishes while it looks; `os.walk` does not.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat().st_size
