"""The adviser: what fits, how far it goes, which layout it takes and what it says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxcel_nb.cluster.shape import LinkShape
from mlxcel_nb.plan.adviser import Advice, Judged, advise
from mlxcel_nb.plan.estimate import EXCHANGE_S, PROCESS, Links, Load, sent_s, summed_s
from mlxcel_nb.plan.facts import Growth, ModelFacts
from mlxcel_nb.plan.nodes import Speed, parse_nodes
from tests.plan.facts import GB, model, refusal

FAST = LinkShape(latency_s=10e-6, bytes_per_s=10e9)
SLOW = LinkShape(latency_s=5e-3, bytes_per_s=12.5e6)
USUAL = Speed(100e9, 1e12, 0.0)
LOAD = Load(4096, 1, 512)


def ask(facts: ModelFacts, nodes: str, load: Load = LOAD, *, local: LinkShape = FAST, net: LinkShape = SLOW) -> Advice:
    return advise(facts, parse_nodes(nodes), load, Links(local, net), USUAL)


def layout(advice: Advice, name: str) -> Judged:
    return next(each for each in advice.judged if each.layout.name == name)


def test_where_one_node_is_enough_nothing_is_split_and_it_says_what_would_be_faster() -> None:
    advice = ask(model(10), "2x24GB")
    assert advice.best is layout(advice, "single")
    assert "One node is enough" in advice.why[0]
    assert layout(advice, "tp2").tokens_per_s > 1.5 * advice.best.tokens_per_s
    assert "tp2 is estimated at 1.81 times" in advice.why[1]


def test_within_one_host_ranks() -> None:
    advice = ask(model(30), "4x16GB")
    assert advice.best is not None
    assert advice.best.layout.name == "tp4"
    assert any("within a host" in each for each in advice.why)


def test_within_hosts_ranks_and_across_them_stages() -> None:
    advice = ask(model(60), "2x24GB,2x24GB")
    assert advice.best is not None
    assert advice.best.layout.name == "tp2xpp2"
    hosts = [{node.host for node in advice.best.placement.stage(stage)} for stage in range(2)]
    assert hosts == [{"host-0"}, {"host-1"}]
    assert any("across what is slow" in each for each in advice.why)


def test_on_uneven_nodes_and_slow_links_stages() -> None:
    advice = ask(model(30), "24GB,16GB")
    assert advice.best is not None
    assert advice.best.layout.name == "pp2"
    text = " ".join(advice.why)
    assert "One node is not enough" in text
    assert "uneven layers" in text


def test_a_size_that_cannot_be_is_refused_with_its_reason() -> None:
    advice = ask(model(4, sizes=(1, 2), refused={3: refusal(3)}), "3x16GB")
    assert advice.refused == (("tp3", "tensor parallel size 3 does not work. Sizes that work: 1, 2."),)
    assert {each.layout.name for each in advice.judged} == {"single", "pp2", "pp3", "tp2"}


def test_stages_that_cannot_be_are_refused_with_their_reason() -> None:
    advice = ask(model(4, unstaged="no stages for it"), "3x16GB")
    assert ("pp2 to pp3", "no stages for it") in advice.refused
    advice = ask(model(2, sizes=(1, 2, 3)), "3x16GB")
    assert ("pp3", "3 stages for 2 layers") in advice.refused


def test_where_nothing_fits_it_says_what_comes_closest() -> None:
    advice = ask(model(48), "8GB,8GB")
    assert advice.best is None
    assert all(each.why_not for each in advice.judged)
    assert "its weights alone take" in layout(advice, "single").why_not
    advice = ask(model(15), "16GB,16GB", Load(100_000, 40))
    assert advice.best is None
    assert "goes furthest" in advice.why[0]
    most = max(each.sequences for each in advice.judged)
    assert 0 < most < 40
    assert f"--concurrency of {most}, or with more or larger nodes" in advice.why[1]
    assert "of up to" in layout(advice, "pp2").why_not


def test_layers_go_by_memory_where_speeds_are_not_known() -> None:
    """Case 11: 48 layers over nodes of 16 and 32 GB."""
    pp2 = layout(ask(model(40), "16GB,32GB"), "pp2")
    first, second = (b - a for a, b in pp2.layout.stages)
    assert (first, second) == (13, 27)
    assert not pp2.why_not


def test_layers_go_by_speed_where_it_is_known_within_what_fits() -> None:
    fast = layout(ask(model(30), "32GB@300GB/s@1TFLOPS,32GB@100GB/s@1TFLOPS"), "pp2")
    assert [b - a for a, b in fast.layout.stages] in ([22, 8], [23, 7])
    tight = layout(ask(model(30), "16GB@300GB/s@1TFLOPS,32GB@100GB/s@1TFLOPS"), "pp2")
    assert not tight.why_not
    assert [b - a for a, b in tight.layout.stages] == [15, 15]


def test_a_dear_head_takes_the_place_of_layers() -> None:
    pp2 = layout(ask(model(20, head=4 * GB), "24GB@100GB/s@1TFLOPS,24GB@100GB/s@1TFLOPS"), "pp2")
    assert [b - a for a, b in pp2.layout.stages] == [12, 8]


def test_context_and_concurrency_are_those_of_the_smallest_stage() -> None:
    """Case 11: what is reported is the least over the stages; filling it exactly fits, and one more does not."""
    facts = model(48, layer=GB // 2, kv=100_000)
    pp2 = layout(ask(facts, "13GB,22GB", Load(4096, 3)), "pp2")
    assert pp2.context == min(part.context for part in pp2.parts) < max(part.context for part in pp2.parts)
    assert pp2.sequences == min(part.sequences for part in pp2.parts)
    exact = layout(ask(facts, "13GB,22GB", Load(pp2.context, 3)), "pp2")
    assert not exact.why_not
    assert exact.sequences == 3
    longer = layout(ask(facts, "13GB,22GB", Load(pp2.context + 1, 3)), "pp2")
    assert longer.why_not
    assert not layout(ask(facts, "13GB,22GB", Load(4096, pp2.sequences)), "pp2").why_not
    assert layout(ask(facts, "13GB,22GB", Load(4096, pp2.sequences + 1)), "pp2").why_not


def test_bytes_of_a_node_add_up() -> None:
    advice = ask(model(30, head=GB), "24GB,24GB", Load(1000, 2))
    for each in advice.judged:
        for part in each.parts:
            used = part.weights + part.cache + part.activations + PROCESS
            assert used + part.left == part.node.memory
            layers = part.layers[1] - part.layers[0]
            assert part.kv_per_token * 1000 * 2 == part.cache == 2 * 1000 * layers * 4096 // each.layout.tp


def test_a_window_ends_what_a_cache_takes() -> None:
    growth = Growth(100, most=1000, step=256)
    assert [growth.at(n) for n in (0, 1, 256, 257, 10_000)] == [0, 25_600, 25_600, 51_200, 100_000]
    assert Growth(fixed=77).at(5) == Growth(fixed=77).at(50_000) == 77
    endless = ask(model(4, growth=Growth(fixed=77)), "16GB")
    assert endless.judged[0].context == 131072


def test_slower_links_make_sums_longer_and_never_change_a_single_node() -> None:
    fast, slow = (ask(model(10), "24GB,24GB", net=net) for net in (FAST, SLOW))
    assert layout(fast, "single").times == layout(slow, "single").times
    assert layout(slow, "tp2").times.sums > 15 * layout(fast, "tp2").times.sums
    assert layout(slow, "pp2").times.token < layout(slow, "tp2").times.token
    assert summed_s(FAST, 1, 1e6) == 0
    assert summed_s(FAST, 4, 64) == pytest.approx(10e-6 + 3 * 64 / 10e9)
    assert summed_s(FAST, 4, 1e9) == pytest.approx(6 * (10e-6 + 0.25e9 / 10e9))


def test_stages_read_a_prompt_at_the_same_time() -> None:
    facts = model(32)
    one, two = (
        layout(ask(facts, "64GB,64GB", Load(4096, 1, 4096), net=FAST), name).times for name in ("single", "pp2")
    )
    assert 0.5 < two.first / one.first < 0.6
    assert two.token == pytest.approx(one.token, rel=0.01)


def test_layers_that_run_twice_over_cost_a_hop_back_from_the_last_stage_to_the_first() -> None:
    """For each token, and for each chunk of the prompt, which ends its laps before the next one begins."""
    once, twice = (model(32, layer=GB // 100, laps=laps) for laps in (1, 2))
    hop, carry = sent_s(SLOW, 8192), sent_s(SLOW, 256 * 8192)
    nodes = "4GB,4GB,4GB"
    plain, round_again = (layout(ask(facts, nodes), "pp3").times for facts in (once, twice))
    assert round_again.token - plain.token == pytest.approx(3 * hop)  # two more onward, and one back
    short, longer = (layout(ask(twice, nodes, Load(4096, 1, count)), "pp3").times.first for count in (256, 512))
    assert short - layout(ask(once, nodes, Load(4096, 1, 256)), "pp3").times.first == pytest.approx(3 * carry)
    assert longer - short > 3 * carry, "the first stage reads the second chunk when the first one has been round"
    alone = [layout(ask(facts, nodes), "single").times for facts in (once, twice)]
    assert alone[0] == alone[1]


def test_what_a_layer_costs_besides_and_its_weights_count_once_a_lap() -> None:
    slow = Speed(100e9, 1e15, 1e-3)
    one, two = (
        advise(model(10, laps=laps), parse_nodes("16GB"), LOAD, Links(FAST, SLOW), slow).judged[0].times
        for laps in (1, 2)
    )
    assert two.token - one.token == pytest.approx(10 * 1e-3)  # of weights the facts count both laps
    assert two.first - one.first == pytest.approx(2 * (10 * GB / 100e9 + 10 * 1e-3))  # two chunks


def test_long_prompts_beside_other_answers_are_worth_a_remark() -> None:
    advice = ask(model(10), "24GB,24GB", Load(8192, 4, 4096))
    assert any("prefill" in each for each in advice.why)
    assert not any("prefill" in each for each in ask(model(10), "24GB,24GB", Load(8192, 1, 4096)).why)


def test_ranks_are_on_one_host_wherever_the_host_stands_in_the_list() -> None:
    advice = ask(replace(model(8)), "40GB,2x16GB")
    assert {node.host for node in layout(advice, "tp2").placement.nodes} == {"host-1"} or (
        layout(advice, "tp2").placement.nodes[0].memory == 40 * GB
    )


def test_ranks_that_share_the_vocabulary_send_their_logits_to_the_one_that_samples() -> None:
    plain, shared = (
        layout(ask(model(10, vocab=1_000_000, vocab_parallel=each), "24GB,24GB"), "tp2") for each in (False, True)
    )
    logits = EXCHANGE_S + sent_s(SLOW, 500_000 * 2)
    for before, after in ((plain.times.token, shared.times.token), (plain.times.sums, shared.times.sums)):
        assert after - before == pytest.approx(logits)
    assert shared.times.first - plain.times.first == pytest.approx(logits)
    assert [part.activations for part in plain.parts] == [shared.parts[0].activations, plain.parts[1].activations]
    assert shared.parts[0].activations == shared.parts[1].activations, "both make logits"
    assert plain.parts[0].activations > plain.parts[1].activations
