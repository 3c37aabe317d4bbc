"""Writes the table of what tensor ranks share from the plans themselves, `mlxcel_nb/models/sharding`.

    python docs/draw_tensor_plans.py            # prints what stands in docs/tensor-plans.md between the two marks
    python docs/draw_tensor_plans.py --write    # puts it there

`tests/models/sharding/test_every_plan.py` holds the page against it.
"""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import architecture, catalogue, sharding
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.plan.part import Part

PAGE = Path(__file__).with_name("tensor-plans.md")
BEGIN = "<!-- from the plans: python docs/draw_tensor_plans.py --write -->\n"
END = "<!-- end of the plans -->\n"
SIZES = (2, 3, 4)


def row(name: str) -> str:
    """The line of one architecture."""
    entry = catalogue.entry(name)
    if entry is None:
        return f"| `{name}` | untested | |"
    try:
        model = architecture.build(copy.deepcopy(entry.config))
    except ModelError as error:
        return f"| `{name}` | | not built here: {error} |"
    n = entry.n_layers
    plans = [sharding.plan(model, entry.config, Part((0, n), n, 0, 1, 0, size)) for size in SIZES]
    blocks = tuple(f"{block.path}." for block in plans[0].blocks)
    arrays = {path: array.shape for path, array in named_arrays(model) if path.startswith(blocks)}
    whole = sum(map(math.prod, arrays.values()))
    shares = [
        sum(math.prod(made.cuts[path].shape(shape) if path in made.cuts else shape) for path, shape in arrays.items())
        for made in plans
    ]
    figures = ", ".join(f"{100 * share / whole:.0f}" for share in shares)
    return f"| `{name}` | {figures} | {'; '.join(dict.fromkeys(plans[0].remarks()))} |"


def table() -> list[str]:
    head = f"| architecture | % of the blocks on the first of {', '.join(map(str, SIZES))} ranks | computed whole |"
    return [head, "|---|---|---|", *map(row, catalogue.architectures())]


def section() -> str:
    """What stands between the marks."""
    return "\n".join([*table(), ""])


def main() -> None:
    if "--write" not in sys.argv:
        print(section(), end="")
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + section() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
