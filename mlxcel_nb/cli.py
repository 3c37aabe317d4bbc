"""`mlxcel-nb`: the command tree in a shell.

Exit status: 0 done, 1 an error (a line on standard error, and under it the last words of processes that are missing),
2 a line that does not parse, 130 stopped by Ctrl-C, 143 by SIGTERM; to `net listen`, `node` and `serve` these two are
ordinary ends.
Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from mlxcel_nb.commands import dispatch, parser, platforms, tree
from mlxcel_nb.commands.console import TerminalConsole
from mlxcel_nb.commands.parser import HelpAsked, UsageProblem, Where
from mlxcel_nb.commands.session import current
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.util import log

TERMINATED = 128 + signal.SIGTERM

MODEL_COMMANDS = frozenset({"generate:generate", "chat:chat", "demo:demo", "plan:plan", "serve:serve", "verify:verify"})
"""Handlers that need MLX; the others work without a back end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status. Whatever it started has stopped by then."""
    _complete_streams()
    if problem := platforms.here():
        return _fail(problem)
    signal.signal(signal.SIGTERM, _terminate)
    log.configure()
    try:
        status = _answered(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of our output has seen enough
        _end_output()
        return 1
    except OSError as error:
        _end_output()
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    finally:
        current().stop_all()


def _complete_streams() -> None:
    """Whoever closed a standard stream (`>&-`) wants to hear nothing. A file takes the lowest free number, so it is
    in the stream's own place, where a socket would otherwise be written to by whoever prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - as long-lived as the process
            setattr(sys, name, stream)


def _answered(argv: list[str]) -> int:
    """Run a command; what it raises on purpose is said, and becomes the exit status."""
    try:
        return _run(argv)
    except HelpAsked as asked:
        print(asked.text, end="")
        return 0
    except UsageProblem as problem:
        return _fail(str(problem), status=2)
    except MlxcelError as problem:
        return _fail(*problem.lines())
    except KeyboardInterrupt:
        return _fail("interrupted", status=dispatch.INTERRUPTED)


def _end_output() -> None:
    """Where standard output takes nothing more, Python's own last flush must not fail as well."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    args = parser.parse(tree.build(Where.SHELL), argv)
    if args.version:
        args.handler = "version:short"
    if args.handler in MODEL_COMMANDS and (problem := platforms.missing_back_end()):
        return _fail(problem)
    return dispatch.run(args, dispatch.Context(TerminalConsole(), current()))


def _terminate(_signum: int, _frame: FrameType | None) -> None:
    """SIGTERM unwinds the stack, so that engines are stopped on the way out."""
    sys.exit(TERMINATED)


def _fail(message: str, *notes: str, status: int = 1) -> int:
    # At once: `print` may write the last line's end after another thread's line.
    sys.stderr.write("".join(f"{line}\n" for line in (f"error: {message}", *notes)))
    return status
