"""What real engines say of their work: spans of the same steps on every member, honest counts, bytes of links."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.engine_report import EngineReport
from mlxcel_nb.errors import Busy
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.spans import Kind, Span, read_spans
from mlxcel_nb.scheduling.step_plan import BLOCK
from tests.cluster.harness import nothing_left, on_engine, wait_until
from tests.tiny import make_tiny

FEW = SamplingParams(max_tokens=6, ignore_eos=True)
PROMPTS = ["a" * (BLOCK + 5), "b" * 700, "c" * 9]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(2)) as cluster:
        yield cluster


def engine(cluster: Cluster) -> EngineReport:
    """Once nothing is left to do."""

    def rest() -> EngineReport | None:
        status = cluster.status()
        return status.engines[0] if {node.activity for node in status.nodes} == {"idle"} else None

    found: EngineReport = wait_until(rest, deadline_s=30, what="the engines to be idle")
    return found


def narrow() -> None:
    """On an engine: what it leads from now on runs one request at a time, and one waits."""
    from dataclasses import replace

    from mlxcel_nb.runtime import engine as module

    made: Any = module
    made.own = made.limits_of
    made.limits_of = lambda *args: replace(made.own(*args), max_rows=1, max_waiting=1)


def narrow_door() -> None:
    """On an engine: two requests may be under way."""
    from mlxcel_nb.runtime import requests as module

    made: Any = module
    made.own, made.MAX_UNDER_WAY = made.MAX_UNDER_WAY, 2


def widen() -> None:
    """On an engine: as it was."""
    from mlxcel_nb.runtime import engine, requests

    made: Any = engine
    made.limits_of = made.own
    door: Any = requests
    door.MAX_UNDER_WAY = getattr(door, "own", door.MAX_UNDER_WAY)


def spans(cluster: Cluster, node_id: str) -> list[Span]:
    told: list[Span] = []
    since = 0
    while True:
        answer: dict[str, Any] = cluster._running().ask(node_id, {"type": "spans", "since": since})["spans"]
        told += read_spans(answer["data"])
        if answer["next"] == since:
            return told
        since = answer["next"]


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2}], ids=["pp2", "tp2"])
def test_members_record_the_same_steps_and_where_their_time_went(
    engines: Cluster, tiny: str, layout: dict[str, int]
) -> None:
    before = {node: len(spans(engines, node)) for node in ("engine-0", "engine-1")}
    engines.load(tiny, **layout)
    try:
        for stream in [engines.stream(prompt, FEW) for prompt in PROMPTS]:
            stream.result()
        report = engine(engines)
        leader, other = (spans(engines, node)[before[node] :] for node in ("engine-0", "engine-1"))
        status = engines.status()
    finally:
        engines.unload()

    def steps(told: list[Span], kind: Kind) -> list[tuple[int, int]]:
        return [(each.epoch, each.step) for each in told if each.kind == kind]

    assert steps(leader, Kind.COMPUTE) == steps(leader, Kind.STEP) == steps(other, Kind.COMPUTE)
    assert len(steps(other, Kind.COMPUTE)) == report.steps == len(steps(other, Kind.WAIT_PLAN))
    assert [each.tokens for each in leader if each.kind == Kind.QUEUE] == [1, *map(len, PROMPTS)]
    read = [each.tokens for each in leader if each.kind == Kind.COMPUTE and each.prefill]
    assert report.prefilled_tokens == 1 + sum(map(len, PROMPTS)) <= sum(read), "and of those who decoded meanwhile"
    assert max(read) <= 256 + len(PROMPTS)
    for told in (leader, other):
        assert all(0 <= each.seconds <= each.end - each.start + 1e-3 for each in told)
        work = [each for each in told if each.kind == Kind.COMPUTE]
        assert all(a.end <= b.start for a, b in itertools.pairwise(work)), "one thread computes"
    ran = [each for each in other if each.kind == Kind.COMPUTE and each.rows]
    if "pp" in layout:
        assert len(steps(other, Kind.WAIT_HIDDEN)) == len(steps(leader, Kind.SEND_HIDDEN)) == len(ran)
        assert steps(leader, Kind.WAIT_TOKENS) == steps(other, Kind.SEND_TOKENS)
    else:
        assert {each.intervals for each in leader if each.kind == Kind.TRANSFER} == {10}, "two for each of 5 layers"
    assert set(report.busy) == {"engine-0", "engine-1"} and all(0 < share <= 1 for share in report.busy.values())
    assert report.bubble is not None and 0 <= report.bubble < 1
    assert report.least_bubble == pytest.approx(1 / 3 if "pp" in layout else 0)
    received = {node.node_id: node.received_bytes for node in status.nodes}
    assert received["engine-0"]["engine-1"] > 0 and received["engine-1"]["engine-0"] > 700 * 64 * 4


def test_counts_are_those_of_the_requests(engines: Cluster, tiny: str) -> None:
    engines.load(tiny)
    try:
        for prompt in PROMPTS:
            engines.generate(prompt, FEW)
        first = engine(engines)
        assert (first.requests, first.refused, first.failed_steps, first.preemptions) == (4, 0, 0, 0)
        assert first.prefilled_tokens == 1 + sum(map(len, PROMPTS)) and first.reused_tokens == 0
        assert first.generated_tokens == 1 + 6 * len(PROMPTS)
        assert (first.running, first.waiting, first.waiting_tokens, first.kv_tokens) == (0, 0, 0, 0)
        assert 0 < first.kv_used_bytes < first.kv_available_bytes and first.kept_blocks > 0, "prefixes are kept"
        engines.generate(PROMPTS[0], FEW)
        again = engine(engines)
        assert again.reused_tokens == BLOCK
        assert again.prefilled_tokens - first.prefilled_tokens == len(PROMPTS[0]) - BLOCK
    finally:
        engines.unload()
    assert engines.status().engines == ()


def test_waiting_and_refused_requests_are_seen_while_they_wait(engines: Cluster, tiny: str) -> None:
    long = SamplingParams(max_tokens=1500, ignore_eos=True)
    on_engine(engines, "engine-0", narrow)
    try:
        engines.load(tiny)
        streams = [engines.stream("x" * 20, long)]
        wait_until(lambda: streams[0].next(1.0), deadline_s=30, what="the first text")
        streams.append(engines.stream("y" * 30, FEW))

        def seen() -> bool:
            (found,) = engines.status().engines
            return (found.running, found.waiting, found.waiting_tokens) == (1, 1, 30)

        wait_until(seen, deadline_s=30, what="one request to run and one to wait")
        assert "decode: 1 running, 1 waiting" in [node.activity for node in engines.status().nodes]
        with pytest.raises(Busy):  # of the scheduler
            engines.generate("z", FEW)
        on_engine(engines, "engine-0", narrow_door)
        with pytest.raises(Busy):  # before it
            engines.generate("z", FEW)
        for stream in streams:
            stream.cancel()
            assert stream.result().finish_reason == "cancelled"
        found = engine(engines)
        assert (found.refused, found.running, found.waiting) == (2, 0, 0)
    finally:
        on_engine(engines, "engine-0", widen)
        engines.unload()
