"""Data parallel replicas on real engines: who answers what, who is asked no more, and what is said of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxcel_nb.client import plans
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.llm import LLM
from mlxcel_nb.client.replicas import FRESH_S
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.display.reports import load_view, node_view, status_view
from mlxcel_nb.errors import ConfigError, EngineLost, ModelError, NodeFailed
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.protocol import GenerateOrder
from tests.cluster.harness import activity, nothing_left, on_engine, raise_in_load, strike, wait_until
from tests.tiny import make_tiny

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(4, threads=1)) as cluster:
        yield cluster


def idle(cluster: Cluster, *nodes: str) -> None:
    wait_until(lambda: {activity(cluster, node) for node in nodes} == {"idle"}, deadline_s=20, what="idle engines")


def test_replicas_share_a_batch_and_each_answer_is_what_one_alone_gives(engines: Cluster, tiny: str) -> None:
    prompts = [[number + 1] * (2 + number % 7) for number in range(24)]
    params = [SamplingParams(max_tokens=2 + number % 9, ignore_eos=True) for number in range(24)]
    engines.load(tiny)
    alone = [engines.generate(each, how) for each, how in zip(prompts, params, strict=True)]
    assert {each.replica for each in alone} == {None}
    engines.unload()
    with LLM(tiny, pipeline_parallel_size=2, data_parallel_size=2, cluster=engines) as llm:
        assert (llm.report.layout, llm.report.replicas) == ("dp2xpp2", 2)
        assert [(part.node_id, part.replica, part.stage) for part in llm.report.parts] == [
            ("engine-0", 0, 0), ("engine-1", 0, 1), ("engine-2", 1, 0), ("engine-3", 1, 1),
        ]  # fmt: skip
        answers = llm.generate(prompts, params)
        assert [each.token_ids for each in answers] == [each.token_ids for each in alone]
        each = [sum(answer.replica == number for answer in answers) for number in (0, 1)]
        assert sum(each) == 24 and min(each) >= 6, each
        assert "pp2 · replica" in answers[0].figures
    idle(engines, "engine-0", "engine-1", "engine-2", "engine-3")
    between = {frozenset((link.source, link.target)) for link in engines.status().links}
    assert engines.model is None and frozenset(("engine-2", "engine-3")) not in between


def test_what_is_said_of_replicas(engines: Cluster, tiny: str) -> None:
    report = engines.load(tiny, tp=2, dp=2)
    single = replace(report, replicas=1)
    text = load_view(report).text
    assert "dp2xtp2" in text and "on all 2 together" in text
    assert "replica" in text and "replica" not in load_view(single).text
    status = engines.status()
    assert [(each.number, each.nodes, each.problem) for each in status.replicas] == [
        (0, ("engine-0", "engine-1"), ""), (1, ("engine-2", "engine-3"), ""),
    ]  # fmt: skip
    shown = status_view(status).text
    assert "Replicas" in shown and "replica 1, stage 0, rank 1" in shown
    assert "replica 1, stage 0, rank 0" in node_view(status, "engine-2").text
    assert report.requests is None or sum(part.requests or 0 for part in report.parts) >= report.requests > 0
    engines.unload()


def test_replicas_that_cannot_be_are_refused_with_what_they_need(engines: Cluster, tiny: str) -> None:
    with pytest.raises(ConfigError, match="dp3xtp2 needs 6 engines, this cluster has 4"):
        engines.load(tiny, tp=2, dp=3)
    with pytest.raises(ConfigError, match="0 replicas"):
        engines.load(tiny, dp=0)
    assert engines.model is None


def test_a_replica_that_cannot_load_frees_all_of_them(engines: Cluster, tiny: str) -> None:
    on_engine(engines, "engine-1", raise_in_load, 1)
    with pytest.raises(NodeFailed, match="engine-1: ZeroDivisionError: struck while loading"):
        engines.load(tiny, dp=2)
    assert engines.model is None
    assert engines.load(tiny, dp=2).layout == "dp2"
    assert len(engines.generate_all(["a", "b", "c"], SHORT)) == 3
    engines.unload()


def test_a_prompt_that_begins_like_one_before_goes_to_the_same_replica(engines: Cluster, tiny: str) -> None:
    engines.load(tiny, dp=2)
    system = [5] * 400
    first = engines.generate([*system, 1], SHORT).replica
    assert {engines.generate([*system, number], SHORT).replica for number in range(6)} == {first}
    others = [engines.generate([number + 10] * 80, SHORT).replica for number in range(4)]
    assert others[0] != first and set(others) == {0, 1}
    engines.unload()


def test_another_notebooks_requests_count_as_load(engines: Cluster, tiny: str) -> None:
    """Two clients of the same replicas: the second keeps replica 0 busy, and the first goes to replica 1."""
    report = engines.load(tiny, dp=2)
    order = engines._held().replicas.all[0].order
    other = Router(engines.name, engines.secret)
    try:
        other.connect({"engine-0": next(node.address for node in engines.nodes if node.node_id == "engine-0")})
        for _ in range(8):
            ask = GenerateOrder(id=new_id(), instance=order.instance, params=ENDLESS, token_ids=[3])
            other.send("engine-0", ask.to_dict())
        wait_until(lambda: activity(engines, "engine-0") != "idle", deadline_s=20, what="the other's requests")
        engines._held().replicas._asked_s = float("-inf")
        answers = [engines.generate([number + 1] * 5, SHORT) for number in range(4)]
        assert {each.replica for each in answers} == {1}
        wait_until(lambda: engines.status().replicas[0].requests, deadline_s=4 * FRESH_S, what="the leader's word")
    finally:
        other.close()
    assert report.replicas == 2
    engines.unload()
    idle(engines, "engine-0", "engine-1")


def test_replicas_with_other_files_are_refused_before_anything_is_loaded(
    engines: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 44, over replicas: files are compared among all of them."""
    for number, node in enumerate(("engine-0", "engine-1", "engine-2")):
        make_tiny(tmp_path / node / "m", seed=number // 2)
        on_engine(engines, node, os.chdir, str(tmp_path / node))
    plan = replace(plans.prepare(str(tmp_path / "engine-0" / "m"), dp=3), path=Path("m"))
    monkeypatch.setattr(plans, "prepare", lambda _model, **_options: plan)
    with pytest.raises(ModelError, match=r"^engine-2: has another model\.safetensors than engine-0"):
        engines.load("m", dp=3)
    assert engines.model is None


@pytest.mark.timeout(120)
def test_no_request_goes_to_a_dead_replica_and_when_all_are_dead_the_error_comes_at_once(tiny: str) -> None:
    """Case 28, with requests under way on the replica that dies: the other goes on with them, to the same text."""
    with nothing_left(Cluster(2, threads=1)) as cluster:
        cluster.load(tiny, dp=2)
        streams = [cluster.stream([number + 1] * 3, LONG) for number in range(4)]
        for stream in streams:
            assert stream.next(20.0) is not None
        assert sorted(stream.replica or 0 for stream in streams) == [0, 0, 1, 1]
        strike(cluster, "engine-1", signal.SIGKILL)
        wait_until(lambda: "SIGKILL" in cluster.lost.get("engine-1", ""), deadline_s=10, what="the loss to be known")
        answers = [cluster.generate([number + 1] * (number + 1), SHORT) for number in range(20)]
        assert {each.replica for each in answers} == {0}
        assert {each.finish_reason for each in answers} == {"length"}
        for stream in streams:
            stream.result()
        assert [stream.moves for stream in streams].count(1) == 2 and {stream.replica for stream in streams} == {0}
        alone = [cluster.generate([number + 1] * 3, LONG).token_ids for number in range(4)]
        assert [stream.token_ids for stream in streams] == alone
        assert {len(stream.token_ids) for stream in streams} == {LONG.max_tokens}
        status = cluster.status()
        assert "engine-1" in status.replicas[1].problem and not status.replicas[0].problem
        assert "no longer works" not in status_view(status).text and cluster.problem == ""

        strike(cluster, "engine-0", signal.SIGKILL)
        wait_until(lambda: "SIGKILL" in cluster.lost.get("engine-0", ""), deadline_s=10, what="the loss to be known")
        began = time.monotonic()
        with pytest.raises(
            EngineLost, match=r"no replica .*replica 0: engine-0 .*SIGKILL.*replica 1: engine-1 .*SIGKILL"
        ):
            cluster.generate("x", SHORT)
        assert time.monotonic() - began < 5
        assert "engine-0" in cluster.problem


@pytest.mark.timeout(120)
def test_a_replica_that_has_fallen_silent_is_passed_by_before_it_counts_as_dead(tiny: str) -> None:
    with nothing_left(Cluster(2, threads=1)) as cluster:
        cluster.load(tiny, dp=2)
        strike(cluster, "engine-1", signal.SIGSTOP)
        router = cluster._running()
        wait_until(lambda: router.state("engine-1")[0] != "alive", deadline_s=10, what="the silence to be noticed")
        assert {cluster.generate([number + 1] * 4, SHORT).replica for number in range(4)} == {0}
        strike(cluster, "engine-1", signal.SIGCONT)


@pytest.mark.timeout(120)
def test_an_answer_that_another_replica_goes_on_with_is_what_it_would_have_been(tiny: str) -> None:
    """Drawn by chance, with log-probabilities, a stop string that spans the loss, and a form that it has to keep to."""
    draws = [
        SamplingParams(max_tokens=600, temperature=1.0, seed=n, logprobs=2, ignore_eos=True) for n in range(10, 30)
    ]
    formed = SamplingParams(max_tokens=600, temperature=1.0, seed=6, regex="[a-z ]{590,}")
    with nothing_left(Cluster(2, threads=1)) as cluster:
        cluster.load(tiny, dp=2)
        made = ((params, cluster.generate("x", params)) for params in draws)
        # One whose last characters do not come until it is half through: all are under way when one replica is lost.
        drawn, whole = next((params, done) for params, done in made if done.text.find(done.text[-9:]) > 300)
        alone = [whole, cluster.generate("x", formed)]
        stopped = replace(drawn, stop=(whole.text[-9:],))
        wanted = [*alone, cluster.generate("x", stopped)]
        streams = [cluster.stream("x", params) for params in (drawn, formed, stopped)]
        for stream in streams:
            assert stream.next(20.0) is not None
        victim = streams[0].replica or 0
        there = [stream for stream in streams if stream.replica == victim]
        strike(cluster, f"engine-{victim}", signal.SIGKILL)
        for stream, whole in zip(streams, wanted, strict=True):
            done = stream.result()
            assert (done.text, done.token_ids) == (whole.text, whole.token_ids)
            assert (done.finish_reason, done.stop_reason) == (whole.finish_reason, whole.stop_reason)
            assert [round(x.logprob, 3) for x in done.logprobs] == [round(x.logprob, 3) for x in whole.logprobs]
            assert done.moves == (stream in there) and done.generation_tokens == whole.generation_tokens
            assert done.timings.ttft_s is not None and done.timings.total_s is not None
            assert done.timings.ttft_s < done.timings.total_s
        assert "replica" in streams[0].completion.figures and "after a loss" in streams[0].completion.figures
