"""Measures how far splits of quantised models are from one process, and writes it into docs/tensor-plans.md.

`python -m docs.draw_quantised --write` takes some minutes. Without `--write` it prints; names of architectures measure
those alone. `tests/models/sharding/test_every_quantised_split.py` tests the same, and holds the page to its bounds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from docs.marked import WRITE, Marked, table
from tests.models.sharding.quantised import BOUNDS, LAYOUTS, MODES, SIZES, differences

PAGE = Marked("tensor-plans", __file__, "quantised splits")
EQUAL_BITS = "equal bits"


def draw() -> Iterator[str]:
    names = [name for name in sys.argv[1:] if name != WRITE] or list(SIZES)
    mx.disable_compile()  # minutes of a C++ compiler otherwise
    found = {(name, mode): _measure(name, mode) for name in names for mode in MODES}
    rows = [(f"`{name}`", *(figure(max(found[name, mode].values())) for mode in MODES)) for name in names]
    yield from table(("architecture", *MODES), rows)
    yield ""
    worst = {layout: max((each.get(layout, 0.0), case) for case, each in found.items()) for layout in LAYOUTS}
    yield from table(
        ("layout", "largest of all", "where", "bound"),
        (
            (f"`{layout}`", figure(off), f"{case[0]}, {case[1]}" if off else "", figure(BOUNDS[layout]))
            for layout, (off, case) in worst.items()
        ),
    )


def _measure(name: str, mode: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        found = differences(name, mode, Path(folder))
    print(name, mode, *(f"{layout} {figure(off)}" for layout, off in found.items()), file=sys.stderr, flush=True)
    return found


def figure(off: float) -> str:
    return f"{off:.1e}" if off else EQUAL_BITS


def number(figure: str) -> float:
    """What `figure` was given."""
    return 0.0 if figure == EQUAL_BITS else float(figure)


if __name__ == "__main__":
    PAGE.main(draw)
