"""Which architectures the installed mlx-lm has, read off its source: nothing is imported, so nothing heavy is loaded.

An architecture is a module that has both a `Model` and its `ModelArgs` at its top, be they defined there or imported
from another. Caches, rotary positions and the parts that models share have not. Safe from any thread.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from mlxcel_nb.errors import ModelError

BOTH = {"Model", "ModelArgs"}


def folder() -> Path:
    """Where mlx-lm keeps its models.

    Raises:
        ModelError: mlx-lm is not installed.
    """
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("mlx-lm is not installed", advice="pip install mlx-lm")
    return Path(spec.submodule_search_locations[0]) / "models"


@functools.cache
def architectures() -> tuple[str, ...]:
    """Names of the modules, sorted."""
    return scan(folder())


def scan(models: Path) -> tuple[str, ...]:
    """Those of one folder."""
    return tuple(sorted(file.stem for file in models.glob("*.py") if set(_names(file)) >= BOTH))


def _names(file: Path) -> Iterator[str]:
    """What the top of a module gives a name to."""
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
