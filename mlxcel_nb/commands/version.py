"""`version`: what is installed, read from package metadata without importing any of it."""

from __future__ import annotations

import argparse
import platform

import mlxcel_nb
from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.display.view import Column, table
from mlxcel_nb.util.versions import DISTRIBUTIONS, local_versions


def version(_args: argparse.Namespace, context: Context) -> None:
    """Handler of `version`."""
    versions = local_versions()
    rows = [("Python", versions["python"])]
    rows += [(distribution, versions.get(name, "not installed")) for name, distribution in DISTRIBUTIONS.items()]
    rows += [("platform", f"{platform.system()} {platform.machine()}")]
    context.console.show(table("", [Column("package"), Column("version")], rows))


def short(_args: argparse.Namespace, context: Context) -> None:
    """Handler of `--version`."""
    context.console.say(f"mlxcel-nb {mlxcel_nb.__version__}")
