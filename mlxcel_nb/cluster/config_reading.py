"""From the text of a cluster file to values of the right types, key by key. Pure; any thread.

The text comes from a user and may hold anything. Nothing stops at the first mistake: a value that cannot be read is
noted, and its key remembered, so that the checks after this one neither trust its default nor complain about it twice.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxcel_nb.cluster.config_keys import CLUSTER_KEYS, FORMAT, MAX_SIZE, NODE_KEYS, RESOURCE_KEYS, TABLES, Key
from mlxcel_nb.cluster.config_lines import Lines, node_table
from mlxcel_nb.cluster.config_model import Mistake
from mlxcel_nb.cluster.names import has_control
from mlxcel_nb.errors import ConfigError

MAX_CHARACTERS = 1 << 20
"""Of a cluster file; 512 nodes with every key need a tenth of it."""

ALONE = frozenset({"name", "model", "transport", "collectives", "memory_bytes", "compute_units"})
"""Keys that no check compares with others: what is wrong with one of them hides nothing."""

_KEY = re.compile(r"\(('[^']*'(?:, )?,?)+\)")
_PART = re.compile(r"'([^']*)'")
"""How Python writes the name of a table, ('cluster',), and the words in it."""

SHOWN = 40
"""Characters of a key that a message repeats."""

NEAR = 0.7
"""How alike a key has to be to one there is for a guess, as difflib counts: `nmae` is like `name` by 0.75, and `colour`
no more like `cluster` than 0.62."""


@dataclass
class Table:
    """One table as it was read.

    Args:
        name: what messages call it: "[cluster]", "node b", "node 2".
        lines: its place in the file, for `line`.
        values: every key it may have; defaults stand where a key is absent or could not be read.
        unknown: keys whose value the user meant to give and we could not read.
    """

    name: str
    place: str
    lines: Lines
    values: dict[str, Any] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)

    def mistake(self, what: str, mend: str, key: str | None = None, *, hides: bool = False) -> Mistake:
        return Mistake(where=self.name, what=what, mend=mend, line=self.lines.of(self.place, key), hides=hides)

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


@dataclass
class Reading:
    """A file's tables, and what was wrong with them."""

    cluster: Table
    nodes: list[Table]
    mistakes: list[Mistake]


def read(text: str) -> Reading:
    """Read `text` as far as it goes. When it is not TOML at all, or of another format, that is the only mistake."""
    empty = Lines("", 0)
    reading = Reading(Table("[cluster]", "cluster", empty), [], [])
    if len(text) > MAX_CHARACTERS:
        reading.mistakes.append(_whole_file(f"has {len(text)} characters", f"At most {MAX_CHARACTERS} are read."))
        return reading
    try:
        document = tomllib.loads(text)
    except RecursionError:
        reading.mistakes.append(_whole_file("nests too deeply", "Take the brackets away."))
        return reading
    except ValueError as error:  # TOMLDecodeError, and what Python says of a number with thousands of digits
        what = "".join(c if c.isprintable() else " " for c in str(error))[:200]
        what = _KEY.sub(lambda key: f"[{'.'.join(_PART.findall(key[0]))}]", what)
        reading.mistakes.append(_whole_file(f"is not TOML: {what}", 'Text is "quoted", and a table has [brackets].'))
        return reading
    nodes = document.get("nodes", [])
    lines = Lines(text, len(nodes) if isinstance(nodes, list) else 0)
    if mistake := _wrong_format(document, lines):
        reading.mistakes.append(mistake)
        return reading
    _read_top(document, lines, reading)
    return reading


def _wrong_format(document: Mapping[str, Any], lines: Lines) -> Mistake | None:
    found = document.get("format", FORMAT)
    if type(found) is int and found == FORMAT:
        return None
    shown = repr(found)[:SHOWN] if isinstance(found, str | float | bool) or _small(found) else "this"
    mend = f"This version reads format = {FORMAT}; update mlxcel_nb where the file comes from a newer one."
    line = lines.of("", "format")
    return Mistake(where="format", what=f"{shown} is not known here", mend=mend, line=line, hides=True)


def _small(value: object) -> bool:
    return isinstance(value, int) and abs(value) < 1 << 64


def _read_top(document: Mapping[str, Any], lines: Lines, reading: Reading) -> None:
    mistakes = reading.mistakes
    known = {"format", "cluster", "nodes"}
    top = Table("", "", lines)
    mistakes += [_unknown(top, key, known, "the top of the file") for key in document if key not in known]

    cluster = reading.cluster = Table("[cluster]", "cluster", lines)
    content = document.get("cluster", {})
    if not isinstance(content, dict):
        mend = "Write [cluster] on a line of its own, and keys below it."
        mistakes.append(cluster.mistake("is not a table", mend, hides=True))
        cluster.unknown = {key.name for key in CLUSTER_KEYS}
        content = {}
    _read_table(cluster, content, CLUSTER_KEYS, mistakes)

    nodes = document.get("nodes", [])
    if not isinstance(nodes, list):
        where = Table("[[nodes]]", node_table(-1), lines)
        mend = "Write [[nodes]], with two brackets, for each node."
        mistakes.append(where.mistake("is not a list of tables", mend, hides=True))
        return
    if not nodes and not any(difflib.get_close_matches(key, ["nodes"], n=1) for key in document if key not in known):
        mend = "Add [[nodes]] with an id and an address for each."
        mistakes.append(Mistake(where="[[nodes]]", what="the file lists no node", mend=mend))
    if len(nodes) > MAX_SIZE:
        what = f"the file lists {len(nodes)} nodes"
        mend = f"At most {MAX_SIZE} can be in one cluster."
        mistakes.append(Mistake(where="[[nodes]]", what=what, mend=mend, hides=True))
        return
    reading.nodes = [_read_node(content, index, lines, mistakes) for index, content in enumerate(nodes)]


def _read_node(content: object, index: int, lines: Lines, mistakes: list[Mistake]) -> Table:
    node = Table(f"node {index + 1}", node_table(index), lines)
    if not isinstance(content, dict):
        mend = "Write [[nodes]] on a line of its own, and keys below it."
        mistakes.append(node.mistake("is not a table", mend, hides=True))
        node.unknown = {key.name for key in NODE_KEYS}
        content = {"id": "", "address": ""}
    elif named(content.get("id")):
        node.name = f"node {content['id']}"
    content = dict(content)
    resources = content.pop("resources", {})
    complaints = mistakes if not node.unknown else []
    _read_table(node, content, NODE_KEYS, complaints)
    below = Table(f"{node.name}, resources", f"{node.place}.resources", lines)
    if not isinstance(resources, dict):
        mend = "Write [nodes.resources] on a line of its own, and keys below it."
        mistakes.append(node.mistake("resources is not a table", mend, "resources"))
        resources = {}
    _read_table(below, resources, RESOURCE_KEYS, mistakes)
    node.values |= below.values
    return node


def named(value: object) -> bool:
    """Whether messages may call a node by this id as it is."""
    return isinstance(value, str) and 0 < len(value) <= 128 and value.isprintable() and value == value.strip()


def _read_table(table: Table, content: Mapping[str, Any], keys: Sequence[Key], mistakes: list[Mistake]) -> None:
    by_name = {key.name: key for key in keys}
    here = "[nodes.resources]" if keys is RESOURCE_KEYS else "[[nodes]]" if keys is NODE_KEYS else "[cluster]"
    for name in content:
        if name not in by_name:
            mistakes.append(_unknown(table, name, by_name, here))
            # A misspelt key was meant to be given: its absence is not a second mistake.
            meant = set(_nearest(name, by_name)) - set(content)
            table.unknown |= meant
            mistakes[-1] = replace(mistakes[-1], hides=bool(meant - ALONE))
    for key in keys:
        table.values[key.name] = None if key.required else key.default
        if key.name in content:
            try:
                table.values[key.name] = key.read(content[key.name])
            except ConfigError as error:
                table.unknown.add(key.name)
                mend = error.advice or f"Write it as {key.kind}."
                mistakes.append(table.mistake(f"{key.name} {error.cause}", mend, key.name, hides=key.name not in ALONE))
        elif key.required and key.name not in table.unknown:
            table.unknown.add(key.name)
            mend = f"{key.about} Write it as {key.kind}."
            mistakes.append(table.mistake(f"{key.name} is missing", mend, hides=key.name not in ALONE))


def _nearest(name: str, known: Mapping[str, Any] | set[str]) -> list[str]:
    """The key that `name` is like, or whose first words it is like: `pipline` means `pipeline_parallel_size`."""
    name = name.casefold().replace("-", "_")
    if near := difflib.get_close_matches(name, known, n=1, cutoff=NEAR):
        return near
    begun = {"_".join(key.split("_")[:count]): key for key in sorted(known) for count in (1, 2) if "_" in key}
    return [begun[words] for words in difflib.get_close_matches(name, begun, n=1, cutoff=NEAR)]


def _unknown(table: Table, name: str, known: Mapping[str, Any] | set[str], here: str) -> Mistake:
    """A key that does not belong where it stands: the table it belongs to, else the nearest key there is."""
    shown = repr(name[:SHOWN]) if has_control(name) or not name.isprintable() or not name else name[:SHOWN]
    elsewhere = next((title for title, keys in TABLES.items() if any(key.name == name for key in keys)), None)
    near = _nearest(name, known)
    if elsewhere:
        mend = f"It belongs under {elsewhere}."
    elif near:
        mend = f"Perhaps {near[0]}?"
    else:
        mend = f"There may be {', '.join(known if isinstance(known, Mapping) else sorted(known))}."
    return table.mistake(f"{shown} is not a key of {here}", mend, name)


def _whole_file(what: str, mend: str) -> Mistake:
    return Mistake(where="", what=what, mend=mend, hides=True)
