"""Arguments of `config`. Pure."""

from __future__ import annotations

from mlxcel_nb.commands.parser import Kind, Tree, Where


def add(tree: Tree) -> None:
    group = tree.group("config", "cluster files")
    detail = "Nothing is started and no name is looked up. All mistakes are shown at once; then the exit status is 1."
    check = group.leaf("check", "check a cluster file", "config:check", detail=detail)
    check.add("file", metavar="FILE", completes=Kind.PATH, help="a cluster file, in TOML")
    check.add("--json", where=Where.SHELL, action="store_true", help="print one JSON object")
