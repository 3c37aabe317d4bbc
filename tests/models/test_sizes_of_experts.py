"""What the plan says of expert-parallel ranks is what they take once they are loaded."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.display.plan import plan_dict, plan_view
from mlxcel_nb.models import architecture, catalogue, sizes
from mlxcel_nb.models.catalogue.families import ENTRIES
from mlxcel_nb.models.loading import load_part
from mlxcel_nb.models.safetensors_index import weight_files
from mlxcel_nb.plan.adviser import advise
from mlxcel_nb.plan.estimate import Links, Load
from mlxcel_nb.plan.nodes import Speed, parse_nodes
from mlxcel_nb.plan.part import part_of
from tests.models.sharding.quantised import quantised
from tests.plan.test_expert_layouts import FAST
from tests.published import PUBLISHED


@pytest.mark.parametrize(
    ("name", "files"), [("qwen3_moe", False), ("gpt_oss", True), ("deepseek_v3", False), ("gemma4", True)]
)
def test_every_rank_takes_what_loading_it_takes(name: str, files: bool, tmp_path: Path) -> None:
    one = catalogue.entry(name)
    assert one is not None
    folder = catalogue.write(one, tmp_path)
    config = {**architecture.read_config(folder), "torch_dtype": "float32"}
    entries = weight_files(folder) if files else None
    facts = sizes.gather(config, name=name, folder=folder, entries=entries, ranks=3)
    n = facts.n_layers
    for rank in range(3):
        part = load_part(folder, part_of(make_layout(n, ep=3), 0, rank), dtype="native", exchange=list)
        assert facts.spread[3][rank].weights((0, n), 0, 1) == part.resident_bytes == part.planned_bytes
    assert facts.spread[2][0].layers[0].cache == facts.ranks[1][0].layers[0].cache


def test_quantised_experts_take_what_loading_them_takes(tmp_path: Path) -> None:
    folder = quantised(ENTRIES["gpt_oss"], tmp_path, {"group_size": 32, "bits": 4, "mode": "mxfp4"})
    config = architecture.read_config(folder)
    facts = sizes.gather(config, name="packed", folder=folder, entries=weight_files(folder), ranks=3)
    for rank in range(3):
        part = load_part(folder, part_of(make_layout(7, ep=3), 0, rank), dtype="native", exchange=list)
        assert facts.spread[3][rank].weights((0, 7), 0, 1) == part.resident_bytes


def test_ranks_that_cannot_be_are_told_and_dense_models_have_none() -> None:
    for name, spread, refused in (("phixtral", [2, 3, 4], [5]), ("llama", [], []), ("dbrx", [], [2, 3, 4, 5])):
        one = catalogue.entry(name)
        assert one is not None
        facts = sizes.gather(copy.deepcopy(one.config), name=name, ranks=5)
        assert (list(facts.spread), list(facts.unspread)) == (spread, refused)


def test_a_large_mixture_is_planned_for_expert_parallel_ranks() -> None:
    """235 billion numbers, of which 227 are experts': of these each of 4 ranks has a quarter."""
    facts = sizes.gather(copy.deepcopy(PUBLISHED["mixture of experts"].config), name="moe", ranks=4)
    whole, n = facts.weights, facts.n_layers
    experts = n * 3 * 128 * 1536 * 4096 * 2
    assert [rank.weights((0, n), 0, 1) for rank in facts.spread[4]] == [whole - experts * 3 // 4] * 4
    assert facts.spread[4][0].layers[0].sums == (4096 * 2, 8 * 4096 * 2 // 4)
    nodes, load, links = parse_nodes("4x200GB"), Load(4096, 8), Links(FAST, FAST)
    advice = advise(facts, nodes, load, links, usual := Speed(400e9, 10e12, 0.0))
    told = plan_dict(facts, nodes, load, links, usual, advice, [])
    ep4 = next(each for each in json.loads(json.dumps(told))["layouts"] if each["layout"] == "ep4")
    assert (ep4["ep"], ep4["tp"], ep4["fits"]) == (4, 1, True)
    assert [part["weights_bytes"] for part in ep4["parts"]] == [whole - experts * 3 // 4] * 4
    assert "ep4" in plan_view(facts, load, advice, []).text
