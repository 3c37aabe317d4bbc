"""One argument tree behind `%mlxcel`, `%%mlxcel` and `mlxcel-nb`: parsing, help and completion all read it.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.wire import hello

SUITES = tuple(hello.SUITES.values())
DTYPES = ("auto", "float32", "native")
HELP_WIDTH = 100
ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}


class Where(enum.Flag):
    """Where a command or an option can be used."""

    MAGIC = enum.auto()
    SHELL = enum.auto()
    BOTH = MAGIC | SHELL


class Kind(enum.Enum):
    """What completes an argument's value."""

    MODEL = "model"
    CACHED = "cached model"
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


def build(here: Where) -> Parser:
    """The whole tree as seen from a notebook (`Where.MAGIC`) or from a shell (`Where.SHELL`)."""
    magic = here is Where.MAGIC
    root = Parser(
        prog="%mlxcel" if magic else "mlxcel-nb",
        description=f"Distributed LLM inference from a {'notebook' if magic else 'shell'}: engines share a model, "
        f"tokens stream into the {'cell' if magic else 'terminal'}.",
    )
    root.set_defaults(handler=None, takes_prompt=False)
    tree = Tree(root, here)
    tree.add("--version", where=Where.SHELL, action="store_true", help="print the version and exit")
    _cluster(tree)
    _load(tree)
    _generate(tree, magic)
    _model(tree)
    _net(tree)
    secret = tree.group("secret", "cluster secrets")
    new = secret.leaf("new", "write a new random secret to a file", "secret:new", detail="Mode 0600; never overwrites.")
    new.add("file", metavar="FILE", completes=Kind.PATH, help="the file to create")
    tree.leaf(
        "demo",
        "two engines, one real model, one streamed answer",
        "demo:demo",
        where=Where.SHELL,
        detail="Leaves nothing running.",
    )
    tree.leaf("version", "versions of this package and of what it stands on", "version:version")
    return root


def _cluster(tree: Tree) -> None:
    group = tree.group("cluster", "start, stop and list clusters" if tree.here is Where.MAGIC else "look for clusters")
    start = group.leaf("start", "start engines on this machine and join them", "cluster:start", where=Where.MAGIC)
    start.add("-n", "--engines", type=_count, default=2, metavar="N", help="how many engines (default 2)")
    start.add("--name", metavar="NAME", help="name of the cluster; a second one needs it")
    start.add("--threads", type=_count, metavar="N", help="CPU threads an engine (default: cores / engines)")
    start.add("--deadline", type=_seconds, default=60.0, metavar="S", help="seconds to be ready in (default 60)")
    _secret_file(start, "use this cluster secret instead of a random one")
    _status(group)
    stop = group.leaf("stop", "stop the cluster and its engines", "cluster:stop", where=Where.MAGIC)
    stop.add("--all", action="store_true", help="stop every cluster this notebook started")
    _on(stop)
    group.leaf("list", "clusters that run on this machine", "cluster:list_clusters")
    _status(tree)


def _status(tree: Tree) -> None:
    status = tree.leaf("status", "who holds what, and over which links", "cluster:status", where=Where.MAGIC)
    status.add("node", metavar="NODE", nargs="?", completes=Kind.NODE, help="all there is to say of this one")
    _on(status)


def _load(tree: Tree) -> None:
    load = tree.leaf("load", "split a model over the engines", "load:load", where=Where.MAGIC)
    _what_to_load(load, positional=True)
    _on(load)
    _on(tree.leaf("unload", "free the model on every engine", "load:unload", where=Where.MAGIC))


def _generate(tree: Tree, magic: bool) -> None:
    detail = (
        "The cell's text is the prompt, word for word." if magic else "The text goes to standard output as it comes."
    )
    generate = tree.leaf("generate", "complete a prompt", "generate:generate", detail=detail, takes_prompt=True)
    about = "the prompt, in place of a cell's text" if magic else "the prompt"
    generate.add("--prompt", metavar="TEXT", help=about if magic else f"{about}; - reads standard input")
    file = "take the prompt from this file, less a last line end"
    generate.add("--prompt-file", metavar="FILE", completes=Kind.PATH, help=file)
    _request(generate, magic)
    generate.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object instead of text")

    detail = "Earlier turns are kept until --reset." if magic else "Reads lines until end of file; /reset starts over."
    chat = tree.leaf("chat", "talk with an instruction-tuned model", "chat:chat", detail=detail, takes_prompt=True)
    about = "what to say, in place of a cell's text" if magic else "what to say; ends after the answer"
    chat.add("--prompt", metavar="TEXT", help=about)
    chat.add("--system", metavar="TEXT", help="system message; a new one starts a new conversation")
    chat.add("--reset", where=Where.MAGIC, action="store_true", help="forget the conversation first")
    _request(chat, magic)


def _request(leaf: Tree, magic: bool) -> None:
    if not magic:
        _what_to_load(leaf, positional=False)
    leaf.add("--max-tokens", type=_whole, default=256, metavar="N", help="most tokens to make (default 256)")
    temperature = ("--temp", "--temperature")
    leaf.add(*temperature, dest="temperature", type=_real, default=0.0, metavar="T", help="0 is greedy (default)")
    leaf.add("--top-p", type=_real, default=1.0, metavar="P", help="keep the likeliest tokens up to this mass")
    leaf.add("--top-k", type=_whole, default=0, metavar="K", help="keep the K likeliest tokens; 0 keeps all")
    leaf.add("--min-p", type=_real, default=0.0, metavar="P", help="drop tokens below this share of the likeliest")
    leaf.add("--repetition-penalty", type=_real, default=1.0, metavar="R", help="over 1 discourages recent tokens")
    leaf.add("--seed", type=_whole, metavar="N", help="same seed, same text")
    stop = r"end before TEXT (\n and \t are understood); repeatable"
    leaf.add("--stop", type=_unescape, action="append", default=[], metavar="TEXT", help=stop)
    keep = "keep the result in this variable"
    leaf.add("-o", "--output", where=Where.MAGIC, metavar="NAME", completes=Kind.VARIABLE, help=keep)
    holes = "put variables in for {name} and $name; {{ and $$ stand for themselves"
    leaf.add("--template", where=Where.MAGIC, action="store_true", help=holes)
    if magic:
        _on(leaf)


def _what_to_load(leaf: Tree, *, positional: bool) -> None:
    about = "a known name, a folder, a GGUF file or a hub id"
    if positional:
        leaf.add("model", metavar="MODEL", completes=Kind.MODEL, help=about)
    else:
        leaf.add("--model", metavar="MODEL", required=True, completes=Kind.MODEL, help=about)
    leaf.add("--tp", type=_count, default=1, metavar="N", help="tensor-parallel ranks a stage (default 1)")
    leaf.add("--pp", type=_count, default=1, metavar="N", help="pipeline stages (default 1)")
    leaf.add("--layers", metavar="A-B,...", help='layers of each stage by hand, as in "0-9,10-29"')
    leaf.add(
        "--dtype", choices=DTYPES, default="auto", help="auto (default) is float32 on CPUs and as stored elsewhere"
    )
    leaf.add("--allow-code", action="store_true", help="let the model folder's own Python code run; else it is refused")


def _model(tree: Tree) -> None:
    group = tree.group("model", "fetch and look at models")
    fetch = group.leaf("fetch", "download a known model into the cache", "model:fetch")
    fetch.add("model", metavar="NAME", completes=Kind.MODEL, help="a known name, or a hub id")
    group.leaf("list", "known and fetched models", "model:list_models")
    info = group.leaf("info", "what a model is made of", "model:info")
    info.add("model", metavar="MODEL", completes=Kind.MODEL, help="a known name, a folder or a GGUF file")
    rm = group.leaf("rm", "remove a model from the cache", "model:rm")
    rm.add("model", metavar="NAME", completes=Kind.CACHED, help="the model to remove")


def _net(tree: Tree) -> None:
    group = tree.group("net", "try the encrypted data plane between two hosts")
    detail = (
        "Every peer that is turned away is a line on standard error. Exit status at the end: 1 when peers came with "
        "another secret, version, cipher suite or cluster and nobody else did, else 0."
    )
    listen = group.leaf("listen", "answer pings until stopped", "net:listen", where=Where.SHELL, detail=detail)
    listen.add("--bind", metavar="HOST:PORT", default="127.0.0.1:0", help="where to listen (default 127.0.0.1:0)")
    _peer(listen)
    ping = group.leaf("ping", "measure round trips and bandwidth to a node", "net:ping")
    ping.add("address", metavar="HOST:PORT", help="where the node listens")
    _peer(ping)
    ping.add("--count", type=_count, default=10, metavar="N", help="how many pings (default 10)")
    ping.add("--size", type=_size, default=64, metavar="BYTES", help="filler of each ping, up to 1 MiB (default 64)")
    ping.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object")


def _peer(leaf: Tree) -> None:
    _secret_file(leaf, "the cluster secret both sides share")
    older = "an older secret that is still good while it is replaced"
    leaf.add("--previous-secret-file", metavar="FILE", completes=Kind.PATH, help=older)
    leaf.add("--cluster", metavar="NAME", default="mlxcel", help="name of the cluster (default mlxcel)")
    leaf.add("--node-id", metavar="ID", help="what this side calls itself (default: made up)")
    leaf.add("--suite", choices=SUITES, default=SUITES[0], help="cipher suite (default aes-256-gcm)")
    leaf.add("--rekey-every", type=_count, metavar="N", help="change keys after N frames")


def _secret_file(leaf: Tree, about: str) -> None:
    names = ("--secret-file", "--cluster-secret-file")
    leaf.add(*names, dest="secret_file", metavar="FILE", completes=Kind.PATH, help=about)


def _on(leaf: Tree) -> None:
    leaf.add("--cluster", metavar="NAME", completes=Kind.CLUSTER, help="which cluster, where there are several")


def parse(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """`words` as a namespace with a `handler`.

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
    if namespace.handler is None and not getattr(namespace, "version", False):
        raise UsageProblem(f"{group.prog} needs a command: {', '.join(group.commands())}", advice=see)
    return namespace


def _refuse(group: Parser, words: Sequence[str]) -> None:
    """Raise for the first of `words` that is none of the group's options."""
    unknown = next((word for word in words if word.partition("=")[0] not in group.options()), None)
    if unknown is not None:
        known = [name for name in group.options() if name.startswith("--")]
        near = difflib.get_close_matches(unknown.partition("=")[0], known, n=1, cutoff=0.75)
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


def _number(kind: Callable[[str], Any], low: float, high: float, what: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return convert


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


_count = _number(int, 1, 2**31 - 1, "a whole number from 1")
_seconds = _number(float, 0.001, 86400, "a time in seconds")
_size = _number(int, 0, 2**20, "a size from 0 to 1048576 bytes")


def _unescape(text: str) -> str:
    out, rest = [], text
    while rest:
        pair = rest[:2]
        out.append(ESCAPES.get(pair, rest[0]))
        rest = rest[2:] if pair in ESCAPES else rest[1:]
    return "".join(out)
