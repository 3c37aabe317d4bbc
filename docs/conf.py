"""The site. `make docs` builds it with warnings as errors; nothing here needs a network or a running cluster."""

from __future__ import annotations

from importlib import metadata
from typing import Any

project = "mlxcel_nb"
author = "the mlxcel_nb authors"
copyright = "2026, the mlxcel_nb authors"  # noqa: A001 - the name Sphinx reads
release = version = metadata.version("mlxcel_nb")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"mlxcel_nb {release}"
html_static_path = ["_static"]
html_copy_source = False

COMMANDS_MARK = "<!-- commands: docs/conf.py puts the help of every one here -->"


def commands() -> str:
    """Every command's help, from the parser that the magics and the shell command share."""
    from mlxcel_nb.commands.parser import Parser, Where
    from mlxcel_nb.commands.tree import build

    def leaves(parser: Parser) -> list[Parser]:
        children = parser.commands()
        return [leaf for child in children.values() for leaf in leaves(child)] if children else [parser]

    lines: list[str] = []
    for title, where in (("In a notebook", Where.MAGIC), ("In a shell", Where.SHELL)):
        lines += [f"## {title}", ""]
        for leaf in leaves(build(where)):
            lines += [f"### `{leaf.prog}`", "", "```text", leaf.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def fill_in(_app: Any, _name: str, source: list[str]) -> None:
    if COMMANDS_MARK in source[0]:
        source[0] = source[0].replace(COMMANDS_MARK, commands())


def setup(app: Any) -> None:
    app.connect("source-read", fill_in)
