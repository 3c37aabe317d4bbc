"""Expert-parallel layouts as the adviser sees them: attention and caches of the requests a rank holds, some experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxcel_nb.cluster.shape import LinkShape
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.plan.adviser import Advice, Judged, advise
from mlxcel_nb.plan.estimate import EXCHANGE_S, PROCESS, Links, Load
from mlxcel_nb.plan.facts import ModelFacts
from mlxcel_nb.plan.nodes import Speed, parse_nodes
from tests.plan.facts import GB, model, refusal

FAST = LinkShape(latency_s=10e-6, bytes_per_s=10e9)
SLOW = LinkShape(latency_s=5e-3, bytes_per_s=12.5e6)
LAYERS = 20


def mixture(*, ep: tuple[int, ...] = (2, 3), unspread: dict[int, ConfigError] | None = None) -> ModelFacts:
    """Layers of 1 GB, three quarters of them experts; of these a token reads an eighth."""
    facts = model(LAYERS)
    (whole,) = facts.ranks[1]

    def rank(size: int) -> object:
        experts = 3 * GB // 4 // size
        layer = replace(
            whole.layers[0], weights=GB // 4 + experts, active=GB // 4 + experts // 8, sums=(8192, 4 * 8192)
        )
        return replace(whole, layers=(layer,) * LAYERS)

    spread = {size: (rank(size),) * size for size in ep}
    return ModelFacts(**{**vars(facts), "spread": spread, "unspread": unspread or {}})


def ask(facts: ModelFacts, nodes: str, load: Load, net: LinkShape = SLOW) -> Advice:
    return advise(facts, parse_nodes(nodes), load, Links(FAST, net), Speed(100e9, 1e12, 0.0))


def layout(advice: Advice, name: str) -> Judged:
    return next(each for each in advice.judged if each.layout.name == name)


def test_a_rank_holds_its_experts_all_the_rest_and_the_caches_of_its_requests() -> None:
    two = layout(ask(mixture(), "24GB,24GB", Load(1000, 3)), "ep2")
    for part in two.parts:
        assert part.weights == LAYERS * (GB // 4 + 3 * GB // 8)
        assert part.kv_per_token == LAYERS * 4096
        assert part.cache == 2 * 1000 * LAYERS * 4096  # 3 requests are 2 on one rank and 1 on the other
        assert part.weights + part.cache + part.activations + PROCESS + part.left == part.node.memory
    assert two.sequences == sum(part.sequences for part in two.parts)
    assert two.context == min(part.context for part in two.parts)


def test_ranks_that_cannot_be_are_refused_with_their_reason_and_dense_models_have_none() -> None:
    advice = ask(mixture(ep=(2,), unspread={3: ConfigError("3 ranks for 2 experts")}), "3x24GB", Load(1000))
    assert ("ep3", "3 ranks for 2 experts") in advice.refused
    assert [each.layout.name for each in advice.judged if each.layout.ep > 1] == ["ep2"]
    dense = ask(model(4), "3x24GB", Load(1000))
    assert not any("ep" in name for name, _ in dense.refused)
    assert not any(each.layout.ep > 1 for each in dense.judged)


def test_the_ways_to_experts_and_back_take_their_time() -> None:
    near, far = (layout(ask(mixture(), "24GB,24GB", Load(1000), net), "ep2").times for net in (FAST, SLOW))
    assert near.sums == pytest.approx(LAYERS * (2 * (EXCHANGE_S + 10e-6) + 5 * 8192 / 10e9))
    assert far.sums > 15 * near.sums
    read = LAYERS * (GB // 4 + 3 * GB // 64 + 1000 * 4096)
    assert near.token - near.sums == pytest.approx(read / 100e9, rel=0.01)
    three = layout(ask(mixture(), "24GB,24GB,24GB", Load(1000), FAST), "ep3").times
    assert three.sums == pytest.approx(LAYERS * (2 * (EXCHANGE_S + 10e-6) + 2 * 5 * 8192 / 10e9))


def test_where_only_experts_can_be_split_it_says_how() -> None:
    facts = mixture()
    only = ModelFacts(
        **{**vars(facts), "ranks": {1: facts.ranks[1]}, "refused": {2: refusal(2)}, "unstaged": "no stages for it"}
    )
    advice = ask(only, "16GB,16GB", Load(1000))
    assert advice.best is layout(advice, "ep2")
    assert any("tokens go to experts over a link of" in each for each in advice.why)
