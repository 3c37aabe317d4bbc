"""What the argument tree behind `%mlxcel`, `%%mlxcel` and `mlxcel-nb` is made of: parsing, help and completion read it.

Pure, and light to import: a handler is named by a string and imported when it runs (`commands.dispatch`). Nothing here
prints or exits; a wrong line raises `UsageProblem` and `-h` raises `HelpAsked`, because a `SystemExit` in a notebook
would end up in the user's cell.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Never

from mlxcel_nb.errors import MlxcelError

HELP_WIDTH = 100

OTHER_NAME = {"--name": "--cluster", "--cluster": "--name"}
"""A cluster is given its name by one of these and called by the other."""


class Where(enum.Flag):
    """Where a command or an option can be used."""

    MAGIC = enum.auto()
    SHELL = enum.auto()
    BOTH = MAGIC | SHELL


class Kind(enum.Enum):
    """What completes an argument's value."""

    MODEL = "model"
    CACHED = "cached model"
    SAVED = "saved keys and values"
    PATH = "path"
    CLUSTER = "cluster"
    NODE = "node"
    VARIABLE = "variable"


class UsageProblem(MlxcelError):
    """A command line that does not parse, or asks for what cannot be."""

    code = "usage"


class HelpAsked(Exception):
    """`-h` was given: `text` is what to show."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises where argparse would print and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _help_formatter)
        super().__init__(*args, **kwargs)
        # No option of ours begins so: "-5ms" is a value, which its option's own text refuses, and "-5" always was.
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.color = False  # Python 3.14 would put escape codes into docstrings
        self.elsewhere: dict[str, str] = {}
        """Sub-commands that are not for this place, and where they are."""

    def error(self, message: str) -> Never:
        raise UsageProblem(_friendly(message, self.elsewhere), advice=f"See: {self.prog} -h")

    def exit(self, _status: int = 0, message: str | None = None) -> Never:
        raise UsageProblem((message or "stopped").strip())

    def print_help(self, _file: Any = None) -> Never:
        raise HelpAsked(self.format_help())

    def commands(self) -> dict[str, Parser]:
        """Sub-commands by name, in the order of the help."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return dict(action.choices)
        return {}

    def options(self) -> dict[str, argparse.Action]:
        """Options by each of their spellings."""
        return {name: action for action in self._actions for name in action.option_strings}

    def positionals(self) -> list[argparse.Action]:
        """Positional arguments in order, sub-commands left out."""
        return [
            action
            for action in self._actions
            if not action.option_strings and not isinstance(action, argparse._SubParsersAction)
        ]


class Tree:
    """Builds one parser, leaving out what is not available `here`."""

    def __init__(self, parser: Parser, here: Where) -> None:
        self.parser = parser
        self.here = here
        self._children: Any = None

    def group(self, name: str, summary: str) -> Tree:
        """A command that only holds others."""
        return self._child(name, summary, "")

    def leaf(
        self,
        name: str,
        summary: str,
        handler: str,
        *,
        where: Where = Where.BOTH,
        detail: str = "",
        takes_prompt: bool = False,
    ) -> Tree:
        """A command that runs `handler`, a "module:function" under `mlxcel_nb.commands`."""
        if where & self.here:
            leaf = self._child(name, summary, detail)
        else:
            leaf = Tree(Parser(prog=name), self.here)
            path = " ".join([*self.parser.prog.split()[1:], name])
            there = f"a notebook: %mlxcel {path}" if where is Where.MAGIC else f"a shell: mlxcel-nb {path}"
            self.parser.elsewhere[name] = f"{path} works only in {there}"
        leaf.parser.set_defaults(handler=handler, takes_prompt=takes_prompt)
        return leaf

    def add(self, *names: str, where: Where = Where.BOTH, completes: Kind | None = None, **kwargs: Any) -> None:
        """`add_argument`, unless the argument is not for this place."""
        if where & self.here:
            action = self.parser.add_argument(*names, **kwargs)
            action.completes = completes  # type: ignore[attr-defined]

    def _child(self, name: str, summary: str, detail: str) -> Tree:
        if self._children is None:
            self._children = self.parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
        description = f"{summary[0].upper()}{summary[1:]}. {detail}".strip()
        return Tree(self._children.add_parser(name, help=summary, description=description), self.here)


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """`words` as a namespace with a `handler`, and the way to its help as `see`.

    Raises:
        UsageProblem, HelpAsked
    """
    group = parser
    for word in words:
        group = group.commands().get(word, group)
    see = f"See: {group.prog} -h"
    try:
        namespace, unknown = parser.parse_known_args(list(words))
    except UsageProblem:
        # What is missing may only be misspelt. A word with a space in it is a value.
        if not group.commands():
            _refuse(group, [word for word in words if re.fullmatch(r"--\w[\w-]*(=.*)?", word)])
        raise
    _refuse(group, unknown)
    namespace.see = see
    if namespace.handler is None and not getattr(namespace, "version", False):
        raise UsageProblem(f"{group.prog} needs a command: {', '.join(group.commands())}", advice=see)
    return namespace


def _refuse(group: Parser, words: Sequence[str]) -> None:
    """Raise for the first of `words` that is none of the group's options."""
    unknown = next((word for word in words if word.partition("=")[0] not in group.options()), None)
    if unknown is not None:
        known = [name for name in group.options() if name.startswith("--")]
        near = difflib.get_close_matches(unknown.partition("=")[0], known, n=1, cutoff=0.75)
        other = OTHER_NAME.get(unknown.partition("=")[0])
        near = [other] if other in known else near
        guess = f", perhaps {near[0]}" if near else ""
        raise UsageProblem(f"{group.prog} does not take {unknown!r}{guess}", advice=f"See: {group.prog} -h")


def split(line: str) -> list[str]:
    """A magic's line as words, by the shell's rules of quoting."""
    try:
        return shlex.split(line)
    except ValueError:
        raise UsageProblem("a quote is not closed", advice='Put "..." round text with an apostrophe.') from None


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=34, width=HELP_WIDTH)


def _friendly(message: str, elsewhere: Mapping[str, str]) -> str:
    """The words of argparse, with the nearest command where one was mistyped, or the place where it works."""
    if "invalid choice: " not in message:
        return message.removeprefix("argument ")
    head, _, tail = message.partition("invalid choice: ")
    wrong, _, known = tail.partition(" (choose from ")
    if (name := wrong.strip("'\"")) in elsewhere and "COMMAND" in head:
        return elsewhere[name]
    choices = [choice.strip(" '\"") for choice in known.rstrip(")").split(",")]
    near = difflib.get_close_matches(name, choices, n=1)
    guess = f", perhaps {near[0]}" if near else f", only {', '.join(choices)}"
    command = "COMMAND" in head
    return (
        f"no such command {wrong}{guess}"
        if command
        else f"{head.removeprefix('argument ')}no such choice {wrong}{guess}"
    )
