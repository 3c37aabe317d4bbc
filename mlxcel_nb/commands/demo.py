"""`demo`: the first lesson in a terminal, through the same magics that a notebook runs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

from mlxcel_nb.commands.dispatch import Context
from mlxcel_nb.commands.model import fetch
from mlxcel_nb.errors import MlxcelError

MODEL = "smollm2-135m"
CELLS = (
    "%load_ext mlxcel_nb",
    "%mlxcel cluster start -n 2",
    f"%mlxcel load {MODEL} --pp 2",
    "%%mlxcel chat --max-tokens 64\nWhat is the capital of France?",
    "%mlxcel status",
    "%mlxcel cluster stop",
)


def demo(_args: argparse.Namespace, context: Context) -> int:
    """Handler of `demo`. Stops at the first cell that fails; the command line then stops what was started."""
    fetch(argparse.Namespace(model=MODEL), context)
    with tempfile.TemporaryDirectory(prefix="mlxcel-demo-") as folder:
        shell = _shell(folder)
        for number, cell in enumerate(CELLS, 1):
            _show(number, cell)
            result = shell.run_cell(cell)
            if isinstance(result.error_in_exec, KeyboardInterrupt):
                raise result.error_in_exec
            if not result.success:
                raise MlxcelError(f"cell {number} of the demo failed")
    return 0


def _shell(folder: str) -> Any:
    """An IPython that keeps no history and leaves the user's own settings alone."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    return InteractiveShell(config=config, ipython_dir=folder)


def _show(number: int, cell: str) -> None:
    lines = cell.split("\n")
    prompt = f"In [{number}]: "
    shown = [prompt + lines[0], *(" " * len(prompt) + line for line in lines[1:])]
    print("\n" + "\n".join(shown), file=sys.stdout, flush=True)
