"""What `/metrics` has of engines, stages, nodes and links."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.serve.engine_series import EngineSeries
from mlxcel_nb.serve.server import ApiServer
from tests.client.test_engine_report import NODES, status
from tests.cluster.harness import wait_until
from tests.serve.callers import ask

Labels = tuple[tuple[str, str], ...]


def series(page: str) -> dict[tuple[str, Labels], float]:
    """As a Prometheus server reads them."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_engines_stages_nodes_and_links_are_told() -> None:
    first, second = NODES
    first = replace(first, work={**first.work, "seconds": {"compute": 7.5, "wait hidden": 2.5, "unheard of": 9}})
    second = replace(second, state="stalled", received_bytes={"engine-0": 4096})
    registry = CollectorRegistry()
    registry.register(EngineSeries(lambda: status(first, second)))
    found = series(generate_latest(registry).decode())
    leader, place = ("leader", "engine-0"), (("node", "engine-0"), ("rank", "0"), ("stage", "0"))
    assert found["mlxcel_engine_running", (leader,)] == 3
    assert found["mlxcel_engine_reused_tokens_total", (leader,)] == 64
    assert round(found["mlxcel_stage_busy_ratio", (leader, ("stage", "1"))], 6) == 0.4
    assert round(found["mlxcel_bubble_ratio", (leader,)], 6) == 0.55
    assert found["mlxcel_node_seconds_total", (("kind", "compute"), *place)] == 7.5
    assert found["mlxcel_node_seconds_total", (("kind", "wait_hidden"), *place)] == 2.5
    assert not any(("kind", "unheard_of") in labels for _, labels in found), "a node cannot add series"
    assert [found["mlxcel_node_up", (("node", f"engine-{n}"),)] for n in (0, 1)] == [1, 0]
    assert found["mlxcel_link_received_bytes_total", (("node", "engine-1"), ("peer", "engine-0"))] == 4096


def test_without_a_cluster_there_is_a_page_all_the_same() -> None:
    registry = CollectorRegistry()
    registry.register(EngineSeries(lambda: None))
    assert series(generate_latest(registry).decode()) == {}


def test_a_server_over_real_engines_tells_what_they_did(tiny_server: ApiServer) -> None:
    def told() -> dict[tuple[str, Labels], float]:
        return series(ask(tiny_server, "GET", "/metrics")[2])

    made = ("mlxcel_engine_generated_tokens_total", (("leader", "engine-0"),))
    before = wait_until(lambda: told().get(made), deadline_s=30, what="the engines to be asked")
    cluster = tiny_server.served.cluster
    assert cluster is not None
    cluster.generate("a prompt", SamplingParams(max_tokens=20, ignore_eos=True))
    wait_until(lambda: told()[made] == before + 20, deadline_s=30, what="the tokens to be told")
    found = told()
    place = (("node", "engine-0"), ("rank", "0"), ("stage", "0"))
    assert found["mlxcel_node_seconds_total", (("kind", "compute"), *place)] > 0
    assert 0 < found["mlxcel_stage_busy_ratio", (("leader", "engine-0"), ("stage", "0"))] <= 1
    assert found["mlxcel_least_bubble_ratio", (("leader", "engine-0"),)] == 0
