"""`%load_ext mlxcel_nb` and its undoing. Runs on the shell's main thread; both may be called again and again."""

from __future__ import annotations

from typing import Any

from mlxcel_nb.commands import session
from mlxcel_nb.notebook.completion import matcher
from mlxcel_nb.notebook.magics import MlxcelMagics

NAME = "mlxcel"


def load(shell: Any) -> None:
    """Register the magics and the completion."""
    shell.register_magics(MlxcelMagics)
    completer = getattr(shell, "Completer", None)
    if completer is not None and matcher not in completer.custom_matchers:
        completer.custom_matchers.insert(0, matcher)


def unload(shell: Any) -> None:
    """Stop this kernel's clusters and take the magics and the completion away."""
    if stopped := session.current().stop_all():
        print(f"Stopped {', '.join(stopped)}: the extension is unloaded.")
    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind].pop(NAME, None)
    completer = getattr(shell, "Completer", None)
    if completer is not None and matcher in completer.custom_matchers:
        completer.custom_matchers.remove(matcher)
