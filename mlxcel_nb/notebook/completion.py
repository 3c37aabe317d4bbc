"""Completion of `%mlxcel` lines, from the same tree that parses them.

`complete` is pure; `matcher` is IPython's way in. It runs on the kernel's main thread, answers from memory and small
folder listings only, and never raises: a completion that fails is no completion.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from mlxcel_nb.commands import tree
from mlxcel_nb.commands.parser import Kind, Parser, Where
from mlxcel_nb.commands.session import current
from mlxcel_nb.util.log import get_logger, trail

TREE = tree.build(Where.MAGIC)
_MAGIC = re.compile(r"\s*%%?mlxcel(?=\s)")
_MAX_PATHS = 200

log = get_logger("notebook.completion")


class _Nothing(list[Any]):
    """No completion, by an answer that counts: IPython puts its own list in the place of one that is empty."""

    def __len__(self) -> int:
        return 1


Sources = Mapping[Kind, Callable[[str], Iterable[str]]]
"""For each kind of value, what could stand there, given what is typed so far."""


@dataclass(frozen=True)
class Suggestion:
    """One way to go on; `kind` is the word a front end shows beside it."""

    text: str
    kind: str


@dataclass(frozen=True)
class Suggestions:
    """What fits in place of `fragment`, the text left of the cursor."""

    fragment: str
    found: tuple[Suggestion, ...]


def complete(tree: Parser, before: str, sources: Sources) -> Suggestions:
    """What can follow `before`, the words after `%mlxcel` up to the cursor."""
    words, fragment = _cut(before)
    node, rest = tree, words
    while rest and rest[0] in node.commands():
        node, rest = node.commands()[rest[0]], rest[1:]
    wanted, given, used = _position(node, rest)
    if wanted is not None:
        return Suggestions(fragment, tuple(_values(wanted, fragment, sources)))
    option, equals, value = fragment.partition("=")
    if equals and option in node.options():
        return Suggestions(value, tuple(_values(node.options()[option], value, sources)))
    found: list[Suggestion] = []
    if not rest:
        found += [Suggestion(name, "command") for name in node.commands() if name.startswith(fragment)]
    positionals = node.positionals()
    if given < len(positionals) and not fragment.startswith("-"):
        found += _values(positionals[given], fragment, sources)
    if fragment.startswith("-") or not found:
        found += _options(node, fragment, used)
    return Suggestions(fragment, tuple(found))


def _cut(before: str) -> tuple[list[str], str]:
    """Whole words, and the one that is being typed; an open quote belongs to the latter."""
    for start in range(len(before), -1, -1):
        head, fragment = before[:start], before[start:]
        if head and not head[-1].isspace():
            continue
        try:
            return shlex.split(head), fragment
        except ValueError:  # the space stands inside a quote
            continue
    return [], before


def _position(node: Parser, words: list[str]) -> tuple[argparse.Action | None, int, set[str]]:
    """The option that waits for a value, how many positionals were given, and the options used so far."""
    options, given = node.options(), 0
    used: set[str] = set()
    wanted: argparse.Action | None = None
    for word in words:
        if wanted is not None:
            wanted = None
        elif (name := word.partition("=")[0]) in options:
            action = options[name]
            if not isinstance(action, argparse._AppendAction):
                used.update(action.option_strings)
            wanted = action if action.nargs != 0 and "=" not in word else None
        else:
            given += 1
    return wanted, given, used


def _options(node: Parser, fragment: str, used: set[str]) -> list[Suggestion]:
    """Long spellings, unless only the short one fits what is typed."""
    names = [name for name in node.options() if name not in used and name.startswith(fragment)]
    return [Suggestion(name, "option") for name in names if name.startswith("--") or name == fragment]


def _values(action: argparse.Action, fragment: str, sources: Sources) -> Iterable[Suggestion]:
    if action.choices is not None:
        return [Suggestion(str(c), "value") for c in action.choices if str(c).startswith(fragment)]
    kind = getattr(action, "completes", None)
    source = sources.get(kind) if kind is not None else None
    if kind is None or source is None:
        return []
    quote = fragment[:1] if fragment[:1] in {"'", '"'} else ""
    found = []
    for text in source(fragment[len(quote) :]):
        shown = f"{quote}{text}" if quote else shlex.quote(text)
        found.append(Suggestion(shown, kind.value))
    return found


def paths(prefix: str) -> list[str]:
    """Files and folders that begin with `prefix`; folders end in a slash."""
    folder, _, start = prefix.rpartition("/")
    base = Path(folder + "/" if "/" in prefix else ".").expanduser()
    lead = prefix[: len(prefix) - len(start)]
    try:
        entries = sorted(base.iterdir())
    except OSError:
        return []
    shown = [e for e in entries if e.name.startswith(start) and (start.startswith(".") or not e.name.startswith("."))]
    return [f"{lead}{entry.name}{'/' if entry.is_dir() else ''}" for entry in shown[:_MAX_PATHS]]


def models(prefix: str) -> list[str]:
    """Known and fetched models, and folders and files once a path is being typed."""
    if "/" in prefix or prefix.startswith((".", "~")):
        return paths(prefix)
    from mlxcel_nb.models.store import list_models

    return [entry.name for entry in list_models() if entry.name.startswith(prefix)]


def cached(prefix: str) -> list[str]:
    """Models in the cache, which can be removed."""
    from mlxcel_nb.models.store import list_models

    return [entry.name for entry in list_models() if entry.fetched and entry.name.startswith(prefix)]


def saved(prefix: str) -> list[str]:
    """Names of saved keys and values."""
    from mlxcel_nb.models.kv_file import list_saved

    return [each.name for each in list_saved() if each.name.startswith(prefix)]


def clusters(prefix: str) -> list[str]:
    """Clusters of this kernel."""
    return [name for name in current().names if name.startswith(prefix)]


def nodes(prefix: str) -> list[str]:
    """Nodes of this kernel's clusters."""
    found = [node.node_id for name in current().names for node in current().get(name).cluster.nodes]
    return [name for name in dict.fromkeys(found) if name.startswith(prefix)]


SOURCES: Sources = {
    Kind.MODEL: models,
    Kind.CACHED: cached,
    Kind.SAVED: saved,
    Kind.PATH: paths,
    Kind.CLUSTER: clusters,
    Kind.NODE: nodes,
}


@context_matcher()
def matcher(context: CompletionContext) -> SimpleMatcherResult:
    """IPython's matcher for the line of a `%mlxcel` or the first line of a `%%mlxcel`."""
    before = context.text_until_cursor
    above = "\n".join(context.full_text.split("\n")[: context.cursor_line]).strip()
    magic = _MAGIC.match(before)
    if magic is None or above.startswith("%%mlxcel") or (above and "%%" in magic[0]):
        return {"completions": []}
    try:
        result = complete(TREE, before[magic.end() :].lstrip(), SOURCES)
    except Exception as error:  # noqa: BLE001  # a front end that asks for completions must not get a traceback
        log.debug("completion failed: %s", trail(error))
        return {"completions": []}
    found: list[Any] = [SimpleCompletion(s.text, type=s.kind) for s in result.found]
    return {"completions": found or _Nothing(), "suppress": True, "ordered": True, "matched_fragment": result.fragment}
