"""Writes the table of what tensor ranks share from the plans themselves, `mlxcel_nb/models/sharding`.

`python -m docs.draw_tensor_plans --write` puts it in docs/tensor-plans.md; without `--write` it is printed.
`tests/models/sharding/test_every_plan.py` holds the page against it.
"""

from __future__ import annotations

import copy
import math

from docs.marked import Marked, table
from mlxcel_nb.errors import ModelError
from mlxcel_nb.models import architecture, catalogue, sharding
from mlxcel_nb.models.stages import named_arrays
from mlxcel_nb.plan.part import Part

PAGE = Marked("tensor-plans", __file__, "the plans")
SIZES = (2, 3, 4)


def draw() -> list[str]:
    head = ("architecture", f"% of the blocks on the first of {', '.join(map(str, SIZES))} ranks", "computed whole")
    return table(head, map(cells, catalogue.architectures()))


def cells(name: str) -> tuple[str, str, str]:
    """The row of one architecture."""
    entry = catalogue.entry(name)
    if entry is None:
        return f"`{name}`", "untested", ""
    try:
        model = architecture.build(copy.deepcopy(entry.config))
    except ModelError as error:
        return f"`{name}`", "", f"not built here: {error}"
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
    return f"`{name}`", figures, "; ".join(dict.fromkeys(plans[0].remarks()))


if __name__ == "__main__":
    PAGE.main(draw)
