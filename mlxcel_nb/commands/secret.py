"""`secret new`."""

from __future__ import annotations

import argparse
from pathlib import Path

from mlxcel_nb.cluster.secret import new_secret_file
from mlxcel_nb.commands.dispatch import Context


def new(args: argparse.Namespace, context: Context) -> None:
    """Handler of `secret new`. The secret itself is never shown."""
    path = Path(args.file).expanduser()
    new_secret_file(path)
    context.console.say(f"wrote a new secret to {path} (mode 0600); copy it to every host over a safe way")
