"""Which libraries are installed, read from package metadata: nothing is imported."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Mapping

DISTRIBUTIONS = {
    "mlxcel_nb": "mlxcel-nb",
    "mlx": "mlx",
    "mlx_lm": "mlx-lm",
    "ipyparallel": "ipyparallel",
    "ipykernel": "ipykernel",
    "cryptography": "cryptography",
}
"""Libraries that nodes of a cluster compare, by the name they are imported by."""


@functools.cache
def local_versions() -> Mapping[str, str]:
    """Versions of Python and of those `DISTRIBUTIONS` that are here."""
    versions = {"python": platform.python_version()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            versions[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
