"""`net interfaces`: what this host is connected to, and what its links can be."""

from __future__ import annotations

import argparse
import json

from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.display.interfaces import interfaces_view, to_dict
from mlxcel_nb.display.view import View, note
from mlxcel_nb.net.interfaces.probe import probe


def interfaces(args: argparse.Namespace, context: Context) -> None:
    """Handler of `net interfaces`."""
    host = probe()
    if getattr(args, "json", False):
        line = json.dumps(to_dict(host))
        context.console.show(View(line, note(line).html))
    else:
        context.console.show(interfaces_view(host))
