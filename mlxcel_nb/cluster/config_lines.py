"""On which line of a TOML text a table or a key stands: what error messages say, and nothing else. Pure; any thread.

TOML's own reader keeps no positions. This looks for the headers and keys as people write them; what it does not
recognise (a string over several lines, tables written inline) it has no line for, so that no message names a wrong one.
"""

from __future__ import annotations

import re

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z_][\w-]*(?:\s*\.\s*[A-Za-z_][\w-]*)*)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*(?:([A-Za-z0-9_-]+)|\"([^\"\\]+)\"|'([^']+)')\s*=")
_MULTI_LINE = re.compile(r'"""|\'\'\'')


class Lines:
    """Lines of tables and keys.

    Args:
        text: the whole file.
        nodes: how many nodes TOML's reader found in it; another count here means that this one was misled.
    """

    def __init__(self, text: str, nodes: int) -> None:
        self._tables: dict[str, int] = {}
        self._keys: dict[tuple[str, str], int] = {}
        if not _MULTI_LINE.search(text):
            found = self._scan(text)
            if found != nodes:
                self._tables.clear()
                self._keys.clear()

    def _scan(self, text: str) -> int:
        table, nodes = "", 0
        for number, line in enumerate(text.split("\n"), 1):
            if match := _HEADER.fullmatch(line):
                table = re.sub(r"\s", "", match[2])
                if match[1] == "[[" and table == "nodes":
                    nodes += 1
                if table == "nodes" or table.startswith("nodes."):
                    table = table.replace("nodes", node_table(nodes - 1), 1)
                self._tables.setdefault(table, number)
            elif match := _KEY.match(line):
                self._keys.setdefault((table, match[1] or match[2] or match[3]), number)
        return nodes

    def of(self, table: str, key: str | None = None) -> int:
        """The line of a key, else of its table; 0 where neither is known."""
        if key is not None and (line := self._keys.get((table, key))):
            return line
        return self._tables.get(table or key or "", 0)


def node_table(index: int) -> str:
    """What the table of the node at `index`, from 0, is called here."""
    return f"nodes[{index}]"
