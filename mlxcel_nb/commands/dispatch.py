"""From a parsed line to its handler. The handler's module is imported here and no earlier."""

from __future__ import annotations

import argparse
import importlib
import signal
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.commands.console import Console
from mlxcel_nb.commands.session import Session

INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a command that the user stopped."""


@dataclass
class Context:
    """What a handler has to work with.

    Attributes:
        prompt: text of the cell, if it ran as a cell magic.
        names: variables of the notebook: where `-o` stores, and what `--template` reads.
    """

    console: Console
    session: Session
    prompt: str | None = field(default=None, repr=False)
    names: dict[str, Any] = field(default_factory=dict, repr=False)


def run(namespace: argparse.Namespace, context: Context) -> int:
    """Run the handler that `parse` chose; returns the exit status, 0 unless the handler says otherwise."""
    module, _, function = namespace.handler.partition(":")
    handler = getattr(importlib.import_module(f"mlxcel_nb.commands.{module}"), function)
    return handler(namespace, context) or 0
