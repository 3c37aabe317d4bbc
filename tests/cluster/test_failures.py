"""An engine is killed, stopped, or raises, while it loads, prefills or decodes, on tp 2 and pp 2.

Cases 23 to 25, 29. Whatever happens: an error that names the node within its deadline, no hang, the next request or the
next cluster works, no process is left.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.errors import EngineLost, MlxcelError, NodeFailed, PeerLost
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.util import times
from tests.cluster.harness import activity, nothing_left, on_engine, raise_in_forward, raise_in_load, strike, wait_until

VICTIM = "engine-1"
LAYOUTS = [{"tp": 2}, {"pp": 2}]
LONG = list(range(1000, 3000))
"""Long enough that its prefill takes seconds."""

PROMPT_S = 5.0
"""A killed process is noticed by its sockets; an exception is told at once."""

SILENT_S = times.DEAD_S + times.PING_S + 5.0
"""A stopped one is noticed by its silence."""


def layout_id(layout: dict[str, int]) -> str:
    return "".join(f"{kind}{n}" for kind, n in layout.items())


def deadline_of(how: int) -> float:
    return SILENT_S if how == signal.SIGSTOP else PROMPT_S


def reach_prefill(cluster: Cluster) -> Stream:
    stream = cluster.stream(LONG, SamplingParams(max_tokens=8))
    wait_until(lambda: activity(cluster, VICTIM) == "prefill", deadline_s=10, what="the victim to prefill")
    return stream


def reach_decode(cluster: Cluster) -> Stream:
    stream = cluster.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
    wait_until(lambda: stream.next(1.0), deadline_s=10, what="the first text")
    return stream


def check_error(error: MlxcelError, how: int) -> None:
    assert error.node == VICTIM, f"names {error.node}: {error}"
    if how == signal.SIGKILL:
        assert isinstance(error, EngineLost) and "SIGKILL" in str(error), repr(error)
    else:
        assert isinstance(error, PeerLost), repr(error)


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_a_lost_engine_is_named_in_time(phase: str, how: int, layout: dict[str, int], smollm2: Path) -> None:
    """Cases 24 and 29."""
    with nothing_left(Cluster(2)) as cluster:
        struck: list[float] = []
        if phase == "load":

            def at_first_progress(news: LoadProgress) -> None:
                if news.node_id == VICTIM and not struck:
                    struck.append(time.monotonic())
                    strike(cluster, VICTIM, how)

            with pytest.raises(MlxcelError) as caught:
                cluster.load(str(smollm2), **layout, on_progress=at_first_progress)
        else:
            cluster.load(str(smollm2), **layout)
            stream = reach_prefill(cluster) if phase == "prefill" else reach_decode(cluster)
            struck.append(time.monotonic())
            strike(cluster, VICTIM, how)
            with pytest.raises(MlxcelError) as caught:
                stream.result()
            assert stream.completion is not None and stream.completion.finish_reason == "error"
        took = time.monotonic() - struck[0]
        check_error(caught.value, how)
        assert took < deadline_of(how), f"took {took:.1f} s"
        wait_until(lambda: activity(cluster, "engine-0") == "idle", deadline_s=5, what="the survivor to be idle")


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_an_exception_in_a_layer_ends_the_request_and_no_more(layout: dict[str, int], smollm2: Path) -> None:
    """Case 25, in prefill, in decode, and while loading: the first error and its node are shown, the next one works."""
    ask = SamplingParams(max_tokens=12)
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(str(smollm2), **layout)
        whole = cluster.generate("The sea is", ask)
        for call, made in ((1, 0), (6, 5)):
            on_engine(cluster, VICTIM, raise_in_forward, call)
            stream = cluster.stream("The sea is", ask)
            began = time.monotonic()
            with pytest.raises(NodeFailed, match=f"{VICTIM}: ZeroDivisionError: struck in layer 3"):
                stream.result()
            assert time.monotonic() - began < PROMPT_S
            assert len(stream.token_ids) == made
            assert cluster.generate("The sea is", ask).token_ids == whole.token_ids
        cluster.unload()
        on_engine(cluster, VICTIM, raise_in_load, 3)
        with pytest.raises(NodeFailed, match=f"{VICTIM}: ZeroDivisionError: struck while loading"):
            cluster.load(str(smollm2), **layout)
        cluster.load(str(smollm2), **layout)
        assert cluster.generate("The sea is", ask).token_ids == whole.token_ids


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_a_short_stop_changes_nothing(layout: dict[str, int], smollm2: Path) -> None:
    """Case 24: SIGSTOP for 3 s, then SIGCONT: the same tokens."""
    ask = SamplingParams(max_tokens=24, ignore_eos=True)
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(str(smollm2), **layout)
        whole = cluster.generate("The sea is", ask)
        stream = cluster.stream("The sea is", ask)
        wait_until(lambda: stream.next(1.0), deadline_s=10, what="the first text")
        strike(cluster, VICTIM, signal.SIGSTOP)
        time.sleep(3.0)  # the case's own figure
        strike(cluster, VICTIM, signal.SIGCONT)
        assert stream.result().token_ids == whole.token_ids
