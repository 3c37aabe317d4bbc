"""Lists of prompts on real engines: order, one by one or all at once, cancels, errors, and a queue that is full."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mlxcel_nb.client import batch
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.llm import LLM
from mlxcel_nb.client.report import BatchProgress
from mlxcel_nb.errors import RequestError
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import activity, nothing_left, on_engine, wait_until
from tests.tiny import make_tiny

ENDLESS = SamplingParams(max_tokens=1500, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    tiny = str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))
    with nothing_left(Cluster(2)) as cluster, LLM(tiny, pipeline_parallel_size=2, cluster=cluster) as llm:
        yield llm


def narrow(rows: int, waiting: int) -> None:
    """On an engine: models that it leads from now on run so many requests at once, and let so many wait."""
    from dataclasses import replace

    from mlxcel_nb.runtime import engine

    module: Any = engine
    own = module.limits_of
    module.limits_of = lambda *args: replace(own(*args), max_rows=rows, max_waiting=waiting)


def idle(cluster: Cluster) -> None:
    """Nothing is under way on any engine."""
    wait_until(
        lambda: {activity(cluster, node.node_id) for node in cluster.nodes} == {"idle"},
        deadline_s=20,
        what="the engines to be idle",
    )


def test_a_list_is_answered_together_and_each_answer_is_what_it_is_alone(llm: LLM) -> None:
    prompts = [f"{number} is a number" * (1 + number % 4) for number in range(24)]
    params = [SamplingParams(max_tokens=1 + number, ignore_eos=True) for number in range(24)]
    together = llm.generate(prompts, params)
    alone = [llm.cluster.generate(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.generation_tokens for answer in together] == list(range(1, 25))


def test_prompts_are_text_or_ids_alone_or_several(llm: LLM) -> None:
    two = SamplingParams(max_tokens=2, ignore_eos=True)
    assert len(llm.generate("text", two)) == 1
    assert len(llm.generate([1, 2, 3], two)) == 1
    assert len(llm.generate([[1, 2, 3], [4]], two)) == 2
    assert llm.generate([], two) == []
    talk = [{"role": "user", "content": "Hi"}]
    assert len(llm.chat([talk, talk], two, n=2)) == 4


def test_several_answers_to_a_prompt_stand_side_by_side(llm: LLM) -> None:
    hot = SamplingParams(max_tokens=8, temperature=30.0, seed=3, ignore_eos=True)
    a, b, c, d = llm.generate(["x", "yy"], hot, n=2)
    assert a.token_ids == llm.generate("x", hot)[0].token_ids
    assert (a.token_ids, c.token_ids) != (b.token_ids, d.token_ids)
    assert [each.token_ids for each in llm.generate(["x", "yy"], hot, n=2)] == [each.token_ids for each in (a, b, c, d)]


def test_the_first_error_names_the_prompts_number_and_ends_the_others(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match=r"^engine-0: prompt 2 of 3: the prompt is empty\. Give it at least one token\.$"
    ):
        llm.generate(["fine", "", "fine"], ENDLESS)
    idle(llm.cluster)


@pytest.mark.timeout(120)
def test_a_queue_that_is_full_is_waited_for_and_no_order_is_lost(llm: LLM) -> None:
    """The leader refuses most of the requests at first."""
    cluster, model = llm.cluster, llm.report.path
    cluster.unload()
    on_engine(cluster, "engine-0", narrow, 2, 2)
    try:
        llm.report = cluster.load(model, pp=2)
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        prompts = [[number + 1] * 3 for number in range(30)]
        answers = llm.generate(prompts, params)
    finally:
        on_engine(cluster, "engine-0", narrow, 64, 256)
    assert [answer.token_ids for answer in answers] == [cluster.generate(each, params).token_ids for each in prompts]


def test_leaving_a_task_cancels_all_of_its_requests(llm: LLM) -> None:
    async def left() -> None:
        task = asyncio.ensure_future(llm.agenerate(["a", "b", "c"], ENDLESS))
        await asyncio.to_thread(
            wait_until, lambda: activity(llm.cluster, "engine-0") != "idle", deadline_s=20, what="the requests to begin"
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(left())
    idle(llm.cluster)
    assert len(asyncio.run(llm.agenerate(["a", "b"], SamplingParams(max_tokens=2, ignore_eos=True)))) == 2


def test_an_interrupt_cancels_all_of_them(llm: LLM) -> None:
    seen: list[BatchProgress] = []

    def first(news: BatchProgress) -> None:
        if not seen:
            signal.raise_signal(signal.SIGINT)
        seen.append(news)

    with pytest.raises(KeyboardInterrupt):
        llm.cluster.generate_all(["a", "b", "c"], ENDLESS, on_progress=first)
    idle(llm.cluster)


def test_no_more_are_under_way_than_an_engine_runs_at_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    begin: Any = batch._Batch.start

    def start(self: Any) -> None:
        nonlocal most
        begin(self)
        most = max(most, len(self._under_way))

    monkeypatch.setattr(batch._Batch, "start", start)
    answers = llm.generate([[1]] * (batch.MOST + 20), SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(answers) == batch.MOST + 20
    assert most == batch.MOST
