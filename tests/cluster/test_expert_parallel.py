"""Expert-parallel ranks on real engines: whoever has the request, the others take part, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client import verifying
from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.plans import prepare
from mlxcel_nb.errors import ConfigError, MlxcelError, RequestError
from mlxcel_nb.models import catalogue
from mlxcel_nb.models.params import SamplingParams
from tests.cluster.harness import nothing_left, on_engine, pid_of, raise_in_layer, wait_until
from tests.tiny import make_tiny, write_tokenizer

PROMPT = [(7 * i + 3) % 257 for i in range(300)]
"""More than a chunk of a prefill."""

ASK = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """7 layers, one of them dense; 8 experts, 3 a token."""
    entry = catalogue.entry("qwen3_moe")
    assert entry is not None
    folder = catalogue.write(entry, tmp_path_factory.mktemp("experts"))
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(3)) as cluster:
        yield cluster


@pytest.fixture
def loaded(engines: Cluster, experts: str) -> Iterator[Cluster]:
    """On 2 of the engines."""
    engines.load(experts, ep=2)
    yield engines
    engines.unload()


def exchanges(cluster: Cluster, rank: int) -> int:
    """Collectives that a rank took part in since it has loaded."""
    status = cluster._running().ask(f"engine-{rank}", {"type": "status"})["status"]
    return int(status["model"]["exchanges"])


@pytest.mark.timeout(180)
def test_every_rank_answers_as_one_process_does(engines: Cluster, experts: str) -> None:
    """Case 9: 8 experts on 2 and on 3 engines; each of them has the request in turn, the others have no token."""
    engines.load(experts)
    alone = engines.generate(PROMPT, ASK).token_ids
    whole = engines.model
    engines.unload()
    for ep in (2, 3):
        report = engines.load(experts, ep=ep)
        assert report.layout == f"ep{ep}"
        for rank in (*range(ep), None):
            assert engines.generate(PROMPT, ASK, rank=rank).token_ids == alone, (ep, rank)
        assert whole is not None
        assert all(part.resident_bytes == part.planned_bytes < whole.parts[0].planned_bytes for part in report.parts)
        assert report.kv_tokens
        engines.unload()


@pytest.mark.timeout(180)
def test_two_hundred_requests_to_one_rank_and_then_one_to_the_other(loaded: Cluster) -> None:
    """Case 10: all are answered, and both ranks have taken part in as many collectives."""
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    answers = {loaded.generate(PROMPT[:5], short, rank=0).token_ids for _ in range(200)}
    answers.add(loaded.generate(PROMPT[:5], short, rank=1).token_ids)
    assert len(answers) == 1
    # The answer may be here before the rank that served has counted its last exchange.
    wait_until(lambda: exchanges(loaded, 0) == exchanges(loaded, 1), deadline_s=20, what="both ranks to have done all")
    assert exchanges(loaded, 0) > 200


@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_that_raises_where_the_request_is_ends_it_everywhere(loaded: Cluster, rank: int) -> None:
    before = loaded.generate(PROMPT[:5], ASK, rank=rank).token_ids
    on_engine(loaded, f"engine-{rank}", raise_in_layer, 2, 3)
    with pytest.raises(MlxcelError, match="struck in layer 3") as caught:
        loaded.generate(PROMPT[:5], ASK, rank=rank)
    assert caught.value.node == f"engine-{rank}"
    assert loaded.generate(PROMPT[:5], ASK, rank=rank).token_ids == before
    assert loaded.generate(PROMPT[:5], ASK, rank=1 - rank).token_ids == before


def break_experts() -> None:
    """On an engine: the experts of the second mixture raise when they are next asked, once."""
    from dataclasses import replace

    from tests.cluster.harness import this_node

    mixtures = this_node()._worker.instance.part.dispatch.mixtures
    whole = mixtures[1]

    def struck(x: Any, indices: Any) -> Any:
        mixtures[1] = whole
        raise ZeroDivisionError("struck experts")

    mixtures[1] = replace(whole, run=struck)


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_that_raise_on_a_rank_that_only_serves_end_the_request_and_are_named(
    loaded: Cluster, rank: int
) -> None:
    """Case 25."""
    before = loaded.generate(PROMPT[:5], ASK, rank=rank).token_ids
    on_engine(loaded, f"engine-{1 - rank}", break_experts)
    with pytest.raises(MlxcelError, match="struck experts") as caught:
        loaded.generate(PROMPT[:5], ASK, rank=rank)
    assert caught.value.node == f"engine-{1 - rank}"
    assert loaded.generate(PROMPT[:5], ASK, rank=rank).token_ids == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cancel_reaches_a_rank_that_only_serves(loaded: Cluster, rank: int) -> None:
    stream = loaded.stream(PROMPT[:5], SamplingParams(max_tokens=1500, ignore_eos=True), rank=rank)
    next(iter(stream))
    stream.cancel()
    assert stream.result().finish_reason == "cancelled"
    assert loaded.generate(PROMPT[:5], ASK, rank=1 - rank).finish_reason == "length"


def test_a_rank_that_is_not_there_is_refused_before_any_rank_hears_of_it(loaded: Cluster) -> None:
    count = exchanges(loaded, 1)
    with pytest.raises(RequestError, match="rank 2 is asked for, and the model has 2"):
        loaded.generate(PROMPT[:5], ASK, rank=2)
    assert exchanges(loaded, 1) == count


@pytest.mark.timeout(120)
def test_verify_compares_expert_parallel_layouts(engines: Cluster, experts: str) -> None:
    """Case 12."""
    found = list(verifying.verify(engines, experts, ["ep2", "ep3"], PROMPT[:40], 8))
    assert [verdict.layout for verdict, _ in found] == ["ep2", "ep3"]
    for verdict, _ in found:
        assert verdict.equal, verdict
        assert verdict.delta <= 1e-4
        assert len(verdict.layer_deltas) == 7


def test_what_cannot_be_is_refused_before_an_engine_hears_of_it(experts: str, tmp_path: Path) -> None:
    dense = str(make_tiny(tmp_path / "tiny"))
    asked: list[tuple[str, dict[str, Any], str]] = [
        (dense, {"ep": 2}, "model type llama, which has no experts to spread"),
        (experts, {"ep": 9}, r"9 expert-parallel ranks for 8 experts\. Sizes that work: 1-8\."),
        (experts, {"ep": 2, "tp": 2}, "which have attention whole, and 2 tensor ranks, which cut it"),
        (experts, {"ep": 2, "pp": 2}, "in each of 2 pipeline stages are not there yet"),
        (experts, {"ep": 2, "layers": "0-2,3-6"}, "in each of 2 pipeline stages"),
        (experts, {"ep": 0}, "0 expert-parallel ranks"),
    ]
    for model, sizes, why in asked:
        with pytest.raises(ConfigError, match=why):
            prepare(model, **sizes)


@pytest.mark.timeout(120)
def test_a_killed_rank_ends_the_answer_and_is_named(experts: str) -> None:
    """Case 29: also the one that only serves."""
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(experts, ep=2)
        stream = cluster.stream(PROMPT[:5], SamplingParams(max_tokens=1500, ignore_eos=True), rank=0)
        next(iter(stream))
        os.kill(pid_of(cluster, "engine-1"), signal.SIGKILL)
        with pytest.raises(MlxcelError) as caught:
            stream.result()
        assert caught.value.node == "engine-1"
        with contextlib.suppress(MlxcelError):
            cluster.unload()
