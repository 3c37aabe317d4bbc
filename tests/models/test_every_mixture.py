"""Prompts that are read in the forwards in which others decode: all are equal to each alone, in every split.

On every architecture of the table. Chunks are uneven, of one sequence and of two; beside them decode none, one and
several, with the place of one that has left among them; then all decode together. CI takes those that stand for the
others and a part that rotates.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxcel_nb.cluster.layout import Layout, make_layout
from mlxcel_nb.models import architecture, catalogue
from mlxcel_nb.models.batching import Group
from mlxcel_nb.models.batching_rows import PLAIN, ROTATING, kind_of, why_not
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.mixing import Mixture
from mlxcel_nb.models.mixing_table import LAZY, MIXED, UNMIXED
from mlxcel_nb.plan.part import Part, whole
from tests.catalogue import RUNNING, chosen
from tests.models.batches import prefilled
from tests.models.mesh import Sum, parts_of
from tests.models.mixtures import every_position, read_while_others_decode
from tests.models.sharding.ranks import across

pytestmark = pytest.mark.usefixtures("not_compiled")

STANDING = ("gpt_oss", "hunyuan", "pixtral", "qwen3")
"""Windows with sinks and experts, layers that give two things, windows in plain caches, and none of it."""

EQUAL = 1e-4


@pytest.mark.parametrize("name", [name for name in chosen(STANDING) if name in MIXED])
def test_what_is_read_beside_others_is_equal_to_each_alone(name: str, tmp_path: Path) -> None:
    """Case 12: in one process, in 2 stages and in 3, on 2 ranks, and on 2 for each stage that share the vocabulary."""
    n = ENTRIES[name].n_layers
    folder = catalogue.write(ENTRIES[name], tmp_path / "m")
    one = [load_part(folder, whole(n))]
    alone = {sequence: every_position(one[0], sequence) for sequence in range(5)}
    found = {"one": read_while_others_decode(one, alone)}
    for pp in (2, 3):
        stages = [load_part(folder, part) for part in parts_of(make_layout(n, pp=pp), 0)]
        found[f"pp {pp}"] = read_while_others_decode(stages, alone)
    found["tp 2"] = max(on_ranks(folder, make_layout(n, tp=2), alone))
    found["pp 2, tp 2"] = max(on_ranks(folder, make_layout(n, tp=2, pp=2), alone, vocab_parallel=True))
    assert {split: difference for split, difference in found.items() if not difference <= EQUAL} == {}


BUILDING = """
import json, sys
from mlxcel_nb.models import blas
blas.load_fast_blas(1)
import mlx.core as mx
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.plan.part import whole
mx.set_default_device(mx.cpu)
mx.disable_compile()
found = {}
for name, (folder, layers) in json.load(sys.stdin).items():
    part = load_part(folder, whole(layers))
    cache, building, running = part.make_cache(), 0, 0
    for length in (5, 1):
        begin = blas.products()
        out = part.forward(mx.arange(length)[None], cache)
        built = blas.products()
        mx.eval(out)
        building, running = building + built - begin, running + blas.products() - built
    found[name] = [part.lazy, building, running]
print(json.dumps(found))
"""
"""Products that were made while forwards were built, and while they ran. They are counted where the fast BLAS is."""


@pytest.mark.skipif(sys.platform != "linux", reason="products are not counted")
def test_while_a_forward_is_built_nothing_is_evaluated(tmp_path: Path) -> None:
    """What sums of tensor ranks rely on that are still on their way then. dbrx shows that it would be seen."""
    names = sorted({"dbrx", *chosen(STANDING)} & MIXED)
    folders = {name: (str(catalogue.write(ENTRIES[name], tmp_path / name)), ENTRIES[name].n_layers) for name in names}
    done = subprocess.run(
        [sys.executable, "-c", BUILDING], input=json.dumps(folders), capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: made for name, (_, made, _) in found.items() if made} == {"dbrx": found["dbrx"][1]}
    assert all(running for _, _, running in found.values())
    assert {name for name, (lazy, _, _) in found.items() if lazy} == LAZY & set(names)


def on_ranks(folder: Path, layout: Layout, alone: dict[int, Any], *, vocab_parallel: bool = False) -> list[float]:
    logits, columns = Sum(2), Sum(2)

    def member(rank: int, all_reduce: Any) -> float:
        def share(value: Any) -> Any:
            return logits.share(rank, value)

        try:
            own = parts_of(layout, rank, vocab_parallel=vocab_parallel)
            parts = [load_part(folder, each, all_reduce=all_reduce, gather=columns.gather(rank)) for each in own]
            return read_while_others_decode(parts, alone, share)
        except BaseException:
            logits.abort()
            columns.abort()
            raise

    return across(2, member)


def test_logits_are_those_wanted_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the head runs on no others: the model's code gives no more than these."""
    entry = ENTRIES["qwen3"]
    part = load_part(catalogue.write(entry, tmp_path / "m"), whole(entry.n_layers))
    kind, given = type(part.model), []
    original = kind.__call__

    def watched(*args: Any, **kwargs: Any) -> Any:
        given.append(original(*args, **kwargs))
        return given[-1]

    monkeypatch.setattr(kind, "__call__", watched)
    ids = mx.array([[5], [6], [1], [2], [3], [4]])

    def logits(wanted: list[int]) -> Any:
        group = Group(part)
        group.join([(row, prefilled([part], row)[0]) for row in (0, 1)])
        found = Mixture(part, group, [(part.make_cache(), 4)]).forward(ids, wanted=wanted)
        assert given[-1].shape == found.shape == (len(wanted), 1, 257)
        return np.array(found)

    every = logits([*range(6)])
    for wanted in ([5], [1, 0], [4, 0, 2]):
        assert np.abs(logits(wanted) - every[wanted]).max() <= EQUAL


def test_only_what_is_proved_mixes(tmp_path: Path) -> None:
    """On one rank or in several stages; not where experts are spread, whose ranks wait for each other's forwards."""
    for name in ("mixtral", "deepseek_v3", "jamba", "gemma2"):
        n = ENTRIES[name].n_layers
        folder = catalogue.write(ENTRIES[name], tmp_path / name)
        assert load_part(folder, whole(n)).mixes == (name in MIXED)
        assert load_part(folder, Part((0, 3), n, 0, 2)).mixes == (name in MIXED)
    n = ENTRIES["mixtral"].n_layers
    spread = Part((0, n), n, 0, 1, ep_rank=1, ep_size=2)
    assert not load_part(tmp_path / "mixtral", spread, exchange=unused).mixes


def unused(*_: Any) -> Any:
    raise AssertionError("nothing is run")


def test_the_table_is_of_the_catalogue() -> None:
    """And all of it that decodes together, with nothing but keys and values, is in the one half or in the other."""
    assert {*MIXED, *UNMIXED} <= {*RUNNING}
    assert not MIXED & UNMIXED.keys()
    models = {name: architecture.build(copy.deepcopy(ENTRIES[name].config)) for name in RUNNING}
    batched = {name: make_prompt_cache(model) for name, model in models.items() if not why_not(model, name)}
    plain = {name for name, caches in batched.items() if all(kind_of(one) in (PLAIN, ROTATING) for one in caches)}
    assert plain == {*MIXED, *UNMIXED}


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text("utf-8")
    section = page.partition("## Prompts that are read beside them")[2].partition("\n## ")[0]
    table = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|$", section, re.MULTILINE))
    assert table == UNMIXED
