"""Sequences that decode together are equal to each alone, on every architecture of the catalogue and in every split.

Five of them, with prompts below, at and above a window of 8, read one by one in uneven chunks: they join late, leave
early, take another's place and change groups, and windows go round. Where caches can be cut, one also begins with
blocks of another's. CI takes those that stand for the others and a part
that rotates.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.batching_blocks import reusable
from mlxcel_nb.models.batching_table import UNBATCHED
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.plan.part import whole
from tests.catalogue import chosen
from tests.models.batches import after_blocks, by_itself, come_and_go
from tests.models.mesh import Sum, parts_of
from tests.models.sharding.ranks import across

pytestmark = pytest.mark.usefixtures("not_compiled")

STANDING = ("deepseek_v32", "falcon_h1", "gemma3n", "gemma4_text", "gpt_oss", "llama4", "nemotron_h", "qwen3")
"""Lists of caches, states beside keys, shared caches, windows with and without sinks, row by row, and plain ones."""


ROW_BY_ROW = {*UNBATCHED, "deepseek_v41", "internlm2", "internlm3", "llama4"}
"""All of the catalogue: those of the table, and what a look at their caches and positions finds."""


@pytest.mark.parametrize("name", chosen(STANDING))
def test_rows_are_equal_to_each_alone(name: str, tmp_path: Path) -> None:
    """Case 12: in one process, in 2 stages and in 3, and on 2 ranks."""
    n = ENTRIES[name].n_layers
    folder = catalogue.write(ENTRIES[name], tmp_path / "m")
    one = [load_part(folder, whole(n))]
    assert bool(one[0].one_by_one) == (name in ROW_BY_ROW)
    alone = {sequence: by_itself(one, sequence) for sequence in range(5)}
    found = {"one": come_and_go(one, alone)}
    for pp in (2, 3):
        layout = make_layout(n, pp=pp)
        stages = [load_part(folder, part) for part in parts_of(layout, 0)]
        found[f"pp {pp}"] = come_and_go(stages, alone)
        if reusable(stages[0].make_cache()):
            found[f"pp {pp}, blocks"] = after_blocks(stages, alone[1])
    found["tp 2"] = max(on_ranks(folder, n, alone))
    assert {split: difference for split, difference in found.items() if not difference <= 1e-4} == {}


def on_ranks(folder: Path, n_layers: int, alone: dict[int, Any]) -> list[float]:
    layout, logits = make_layout(n_layers, tp=2), Sum(2)

    def member(rank: int, all_reduce: Any) -> float:
        def share(value: Any) -> Any:
            return logits.share(rank, value)

        try:
            own = parts_of(layout, rank)
            return come_and_go([load_part(folder, part, all_reduce=all_reduce) for part in own], alone, share)
        except BaseException:
            logits.abort()
            raise

    return across(2, member)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text("utf-8")
    section = page.partition("## Sequences that decode together")[2].partition("\n## ")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", section, re.MULTILINE))
    assert table.keys() == ROW_BY_ROW - {"internlm2", "internlm3"}
    assert UNBATCHED.items() <= table.items()
    assert {*table} <= {*ENTRIES}
