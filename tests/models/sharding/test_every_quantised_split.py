"""Ten architectures in every mode of quantisation, kept as they are, against the quantised single process.

`make catalogue` goes over all; a push over each architecture in one mode, every mode twice, and a part that rotates.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import draw_quantised
from tests.catalogue import has_its_turn, wanted
from tests.models.sharding.quantised import BOUNDS, LAYOUTS, MODES, SIZES, differences

pytestmark = pytest.mark.usefixtures("not_compiled")

STANDING = {(name, list(MODES)[i % len(MODES)]) for i, name in enumerate(SIZES)}

ALL = [(name, mode) for name in SIZES for mode in MODES]
NOW = [
    (name, mode)
    for name, mode in ALL
    if name in wanted() or (not wanted() and ((name, mode) in STANDING or has_its_turn(f"{name} {mode}")))
]


@pytest.mark.parametrize(("name", "mode"), NOW)
def test_stages_have_the_bits_of_the_whole_and_ranks_its_tokens_and_logits(
    name: str, mode: str, tmp_path: Path
) -> None:
    """Case 4: each rank keeps bits, group size and mode, and what was planned; only the order of sums differs."""
    found = differences(name, mode, tmp_path)
    assert {"tp2", "pp2", "tp2xpp2"} <= set(found) <= set(LAYOUTS)
    for layout, off in found.items():
        assert off <= BOUNDS[layout], layout


def test_the_page_says_how_far_each_is_off() -> None:
    lines = [line.split(" | ") for line in draw_quantised.PAGE.lines()]
    rows = {cells[0].strip("| `"): [cell.strip("| ") for cell in cells[1:]] for cells in lines if len(cells) > 1}
    assert rows["architecture"] == list(MODES)
    assert [name for name in rows if name in SIZES] == list(SIZES)
    assert all(0 < float(figure) <= BOUNDS["tp2"] for name in SIZES for figure in rows[name])
    for layout, bound in BOUNDS.items():
        assert draw_quantised.number(rows[layout][0]) <= bound
        assert draw_quantised.number(rows[layout][2]) == bound
