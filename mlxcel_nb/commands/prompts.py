"""Where a prompt comes from, and what may be put into it. Pure.

A prompt is taken word for word: `{}`, `$`, `%` and quotes mean nothing unless `--template` asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlxcel_nb.commands.parser import UsageProblem

_HOLE = re.compile(r"\{\{|\}\}|\$\$|\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)")
_LITERAL = {"{{": "{", "}}": "}", "$$": "$"}


def choose(option: str | None, cell: str | None) -> str | None:
    """The prompt of `--prompt` or of the cell, less the one line end every cell has; None when there is neither.

    Raises:
        UsageProblem: there are both.
    """
    body = cell.removesuffix("\n") if cell is not None else None
    if option is not None and body:
        raise UsageProblem("there is a --prompt and a cell text", advice="Give one of the two.")
    return body if option is None else option


def interpolate(text: str, names: Mapping[str, Any]) -> str:
    """`{name}` and `$name` replaced by variables; `{{`, `}}` and `$$` stand for themselves. Other braces stay.

    Raises:
        UsageProblem: a name that is no variable.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name is None:
            return _LITERAL[match[0]]
        if name not in names:
            literal = f"{{{match[0]}}}" if match[1] else f"${match[0]}"
            raise UsageProblem(f"--template: no variable is called {name}", advice=f"Write {literal} to keep it.")
        return str(names[name])

    return _HOLE.sub(fill, text)
