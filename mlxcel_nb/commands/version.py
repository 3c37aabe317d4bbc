"""`version`: what is installed, read from package metadata without importing any of it."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

import mlxcel_nb
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.display.view import Column, table

PACKAGES = ("mlx", "mlx-lm", "ipyparallel", "ipykernel", "cryptography")


def version(_args: argparse.Namespace, context: Context) -> None:
    """Handler of `version`."""
    rows = [("mlxcel_nb", mlxcel_nb.__version__), ("Python", platform.python_version())]
    rows += [(package, installed(package)) for package in PACKAGES]
    rows += [("platform", f"{platform.system()} {platform.machine()}")]
    context.console.show(table("", [Column("package"), Column("version")], rows))


def installed(package: str) -> str:
    """The version of a distribution, or that it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def short(_args: argparse.Namespace, context: Context) -> None:
    """Handler of `--version`."""
    context.console.say(f"mlxcel-nb {mlxcel_nb.__version__}")
