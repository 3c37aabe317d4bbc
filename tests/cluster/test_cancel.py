"""A cancel at any moment, on any layout, leaves every rank free for the next request at once.

The moments in which a rank is between two steps are short, so each layout is cancelled many times, a little later
each time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.router import new_id
from mlxcel_nb.errors import MlxcelError, RequestError, WireError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.protocol import GenerateOrder
from mlxcel_nb.util import times
from tests.cluster.harness import activity, nothing_left, strike, wait_until
from tests.tiny import make_tiny

ASK = SamplingParams(max_tokens=6, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)
CANCELS = 12


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture(scope="module")
def engines() -> Iterator[Cluster]:
    with nothing_left(Cluster(4)) as cluster:
        yield cluster


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 3}, {"tp": 2, "pp": 2}], ids=["tp2", "pp3", "tp2xpp2"])
def test_a_cancel_at_any_moment_leaves_every_rank_free(engines: Cluster, tiny: str, layout: dict[str, int]) -> None:
    engines.load(tiny, **layout)
    whole = engines.generate("again", ASK).token_ids
    for turn in range(CANCELS):
        stream = engines.stream([5] * 300, ENDLESS)
        if turn % 3:
            assert stream.next(10.0) is not None
        time.sleep(turn * 0.003)  # the moment itself is what is varied
        began = time.monotonic()
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"
        assert engines.generate("again", ASK).token_ids == whole
        assert time.monotonic() - began < 10.0
    engines.unload()


def test_ids_past_the_vocabulary_are_refused_and_harm_nobody(engines: Cluster, tiny: str) -> None:
    engines.load(tiny, pp=2)
    for bad in (257, 2**31 - 1):
        with pytest.raises(RequestError, match="vocabulary of 257"):
            engines.generate([1, bad], SamplingParams(max_tokens=2, repetition_penalty=1.3))
    assert engines.generate("next", ASK).generation_tokens == 6
    engines.unload()


def test_a_request_sent_to_a_follower_is_refused_and_harms_nobody(engines: Cluster, tiny: str) -> None:
    report = engines.load(tiny, pp=2)
    router, instance = engines._running(), engines._held().replicas.one().order.instance
    assert instance is not None
    order = GenerateOrder(id=new_id(), instance=instance, params=ASK, prompt="x")
    answers: list[dict[str, object]] = []
    router.open_inbox(order.id, lambda _node, message: answers.append(message))
    router.send(report.parts[1].node_id, order.to_dict())
    wait_until(lambda: answers, deadline_s=10, what="the refusal")
    assert isinstance(answers[0]["error"], dict) and answers[0]["error"]["code"] == WireError.code
    assert engines.generate("next", ASK).generation_tokens == 6
    engines.unload()


def test_a_stopped_stage_with_much_in_flight_ends_the_answer_in_time(smollm2: Path) -> None:
    """The word that ends the epoch must not stand before the user's answer: the stopped stage takes neither."""
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(str(smollm2), layers="0-0,1-29")
        stream = cluster.stream(list(range(1000, 8000)), SamplingParams(max_tokens=4))
        wait_until(
            lambda: activity(cluster, "engine-1") == "prefill", deadline_s=10, what="the second stage to prefill"
        )
        struck = time.monotonic()
        strike(cluster, "engine-1", signal.SIGSTOP)
        with pytest.raises(MlxcelError, match=r"^engine-1: "):
            stream.result()
        assert time.monotonic() - struck < times.DEAD_S + times.PING_S + 5.0
