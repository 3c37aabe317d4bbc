"""`%mlxcel` and `%%mlxcel`: the command tree in a cell.

Runs on the thread that executes the cell. A magic shows what it has to show and returns nothing; results are kept with
`-o NAME`. Prompts reach the model word for word: IPython's own expansion of `{}` and `$` is off.
"""

from __future__ import annotations

import sys
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from mlxcel_nb.commands import dispatch, parser, platforms, tree
from mlxcel_nb.commands.console import Console, TerminalConsole
from mlxcel_nb.commands.parser import HelpAsked, UsageProblem, Where
from mlxcel_nb.commands.session import current
from mlxcel_nb.display.errors import table_view
from mlxcel_nb.errors import Cancelled, MlxcelError
from mlxcel_nb.notebook.console import NotebookConsole

TREE = tree.build(Where.MAGIC)


@magics_class
class MlxcelMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: Any, console: Console | None = None) -> None:
        super().__init__(shell)
        self.console = console or console_for(shell)
        self.names: dict[str, Any] = shell.user_ns

    @no_var_expand
    @line_cell_magic
    def mlxcel(self, line: str, cell: str | None = None) -> None:
        try:
            self._run(line, cell)
        except HelpAsked as asked:
            print(asked.text, end="")
        except UsageProblem as problem:
            raise UsageError(str(problem)) from None

    def _run(self, line: str, cell: str | None) -> None:
        args = parser.parse(TREE, parser.split(line))
        if cell is not None and cell.strip() and not args.takes_prompt:
            raise UsageProblem("this command takes no text in its cell", advice=f"Write it with one %: %mlxcel {line}")
        if problem := platforms.here():
            raise UsageProblem(problem)
        context = dispatch.Context(self.console, current(), prompt=cell, names=self.names)
        try:
            dispatch.run(args, context)
        except KeyboardInterrupt:
            raise Cancelled(f"interrupted: %mlxcel {line}".rstrip()) from None
        except MlxcelError as error:
            if error.table is not None and isinstance(self.console, NotebookConsole):
                self.console.show(table_view(error.table))  # drawn; the error's own text need not have it again
                error.table = None
            raise


MlxcelMagics.mlxcel.__doc__ = TREE.format_help()


def console_for(shell: Any) -> Console:
    """A notebook's displays where there is a kernel; in a terminal plain text, all of it in one stream."""
    return NotebookConsole() if getattr(shell, "kernel", None) is not None else TerminalConsole(err=sys.stdout)
