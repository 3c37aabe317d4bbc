"""What is made of what nodes say of their work, and how it is shown."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel_nb.client.engine_report import engines_of
from mlxcel_nb.client.report import ClusterStatus, NodeReport
from mlxcel_nb.display.reports import node_view, status_view

FACTS = {
    "running": 3, "waiting": 2, "waiting_tokens": 120, "kv_tokens": 900, "kv_used_bytes": 5_000_000,
    "kv_available_bytes": 10_000_000, "kept_blocks": 7, "preemptions": 1, "stages": 2, "micro_batches": 2,
    "requests": 9, "refused": 4, "steps": 500, "prefilled_tokens": 1000, "reused_tokens": 64,
    "generated_tokens": 480, "failed_steps": 0,
}  # fmt: skip


def node(node_id: str, stage: int, *, instance: str = "i", **work: Any) -> NodeReport:
    return NodeReport(node_id=node_id, state="alive", stage=stage, rank=0, instance=instance, work=work)


def latest(steps: int, compute_s: float, *, results: int = 0, step_s: float = 0.0, **more: float) -> dict[str, Any]:
    return {"steps": steps, "results": results, "seconds": {"compute": compute_s, "step": step_s, **more}}


NODES = (
    node("engine-0", 0, engine=FACTS, latest=latest(102, 10.2, results=100, step_s=20.0)),
    node("engine-1", 1, engine=None, latest=latest(100, 8.0, **{"wait hidden": 5.0, "wait plan": 99.0})),
)


def status(*nodes: NodeReport) -> ClusterStatus:
    return ClusterStatus(name="c", router_id="r", state="running", nodes=nodes, links=(), model=None)


def test_busy_and_bubble_are_of_the_engines_own_members_beside_what_gpipe_says() -> None:
    (engine,) = engines_of([*NODES, node("engine-2", 0, instance="another", latest=latest(100, 19.0))])
    assert engine.node_id == "engine-0" and (engine.running, engine.waiting, engine.reused_tokens) == (3, 2, 64)
    assert engine.busy == pytest.approx({"engine-0": 0.5, "engine-1": 0.4})
    assert engine.bubble == pytest.approx(0.55) and engine.least_bubble == pytest.approx(1 / 3)
    assert engine.measured == 100


def test_ranks_of_a_stage_count_as_one() -> None:
    third = node("engine-2", 1, latest=latest(100, 4.0))
    (engine,) = engines_of([*NODES, third])
    assert engine.stage_busy == pytest.approx({0: 0.5, 1: 0.3}) and engine.bubble == pytest.approx(0.6)


def test_each_replica_has_an_engine_of_its_own() -> None:
    other = node("engine-2", 0, instance="j", engine={**FACTS, "stages": 1}, latest=latest(10, 1.0))
    first, second = engines_of([*NODES, other])
    assert (first.node_id, second.node_id) == ("engine-0", "engine-2")
    assert second.busy == {} and second.bubble is None, "it has no result yet"


def test_a_stage_that_does_not_answer_leaves_no_bubble() -> None:
    (engine,) = engines_of([NODES[0], NodeReport(node_id="engine-1", state="alive", stage=1, instance="i")])
    assert engine.busy == pytest.approx({"engine-0": 0.5}) and engine.bubble is None


@pytest.mark.parametrize(
    "work",
    [
        {},
        {"engine": 7, "latest": "x"},
        {"engine": {}, "latest": {"steps": "many", "seconds": [1]}},
        {"engine": {"running": -3, "stages": float("inf"), "waiting": True}, "latest": {"seconds": {"step": "x"}}},
    ],
)
def test_what_is_no_figure_counts_as_nothing_said(work: dict[str, Any]) -> None:
    engines = engines_of([node("engine-0", 0, **work)])
    assert all((each.running, each.waiting, each.stages, each.bubble) == (0, 0, 1, None) for each in engines)
    status_view(status(node("engine-0", 0, **work)))


def test_status_shows_what_engines_have_to_do_and_how_busy_they_are() -> None:
    lines = status_view(status(*NODES)).text.splitlines()
    row = next(lines[at + 2] for at, line in enumerate(lines) if line == "Engine")
    assert " ".join(row.split()) == "engine-0 3 2 900 tokens, 5 MB of 10 MB 1000 64 480 1 4"
    assert (
        "Busy with computing over the latest 100 steps: engine-0 50%, engine-1 40%; a stage waits 55% of its time, "
        "at least 33% by GPipe's formula."
    ) in lines


def test_a_node_shows_what_its_steps_are_made_of() -> None:
    text = node_view(status(*NODES), "engine-1").text
    assert "40% of its time while there is work" in text
    assert "compute 80.0 ms, wait hidden 50.0 ms" in text and "wait plan" not in text
