"""An engine is killed, stopped, or raises, while it loads, prefills or decodes, on tp 2 and pp 2.

Cases 23 to 25, 29. Whatever happens: an error that names the node within its deadline, no hang, the next request or the
next cluster works, no process is left.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.client.report import LoadProgress
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.errors import ClusterError, EngineLost, MlxcelError, NodeFailed, PeerLost
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.util import times
from tests.cluster.harness import (
    activity,
    die_in_step,
    nothing_left,
    on_engine,
    raise_in_layer,
    raise_in_load,
    strike,
    wait_until,
    when_loaded,
)
from tests.tiny import make_tiny

VICTIM = "engine-1"
LAYOUTS = [{"tp": 2}, {"pp": 2}]
LONG = list(range(1000, 3000))
"""Long enough that its prefill takes seconds."""

PROMPT_S = 8.0
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
        if phase == "load" and how == signal.SIGKILL:  # case 36, when the system itself kills for want of memory
            doing = r"was killed by SIGKILL.* while loading (the embedding|layer \d+|the final norm and head)\b"
            assert re.search(doing, str(caught.value)), caught.value
        assert took < deadline_of(how), f"took {took:.1f} s"
        wait_until(lambda: activity(cluster, "engine-0") == "idle", deadline_s=10, what="the survivor to be idle")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_an_exception_in_a_layer_ends_the_request_and_no_more(layout: dict[str, int], smollm2: Path) -> None:
    """Case 25, in prefill, in decode, and while loading: the first error and its node are shown, the next one works.

    The third layer raises between its two all-reduces, on a follower, and on the leader when all were told to begin.
    The deadline counts from the moment at which it does, however long the machine took to get there.
    """
    ask = SamplingParams(max_tokens=12)
    with nothing_left(Cluster(2)) as cluster:
        cluster.load(str(smollm2), **layout)
        whole = cluster.generate("The sea is", ask)
        for victim, call, made in ((VICTIM, 1, 0), (VICTIM, 6, 5), ("engine-0", 1, 0), ("engine-0", 6, 5)):
            on_engine(cluster, victim, raise_in_layer, 2, call)
            stream = cluster.stream("The sea is", ask)
            with pytest.raises(NodeFailed, match=f"{victim}: ZeroDivisionError: struck in layer 3 at ") as caught:
                stream.result()
            struck = re.search(r" at (\d+\.\d+)", str(caught.value))
            assert struck is not None
            assert time.monotonic() - float(struck[1]) < PROMPT_S
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


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
def test_survivors_load_again_whoever_is_killed_and_when(layout: dict[str, int], tmp_path: Path, smollm2: Path) -> None:
    """Case 29: in the warm-up, then between tokens 5 and 6, first a follower and then the leader.

    After each loss the engines that are left load again, in the end another model.
    """
    tiny = str(make_tiny(tmp_path / "tiny"))
    ask = SamplingParams(max_tokens=12, ignore_eos=True)
    with nothing_left(Cluster(4)) as cluster:
        on_engine(cluster, "engine-1", when_loaded, die_in_step, 1)
        with killed("engine-1"):
            cluster.load(tiny, **layout)
        assert cluster.model is None
        whole: tuple[int, ...] | None = None
        for members in (("engine-0", "engine-2"), ("engine-0", "engine-3")):
            leader, follower = members
            report = cluster.load(tiny, **layout)
            assert tuple(part.node_id for part in report.parts) == members
            whole = whole or cluster.generate("again", ask).token_ids
            assert cluster.generate("again", ask).token_ids == whole
            victim = follower if follower == "engine-2" else leader
            on_engine(cluster, victim, die_in_step, 6)
            stream = cluster.stream("again", ask)
            with killed(victim):
                stream.result()
            assert stream.completion is not None and stream.completion.finish_reason == "error"
            # What the leader said last may have died with it.
            assert stream.token_ids in ([whole[:5]] if victim == follower else [whole[:5], whole[:4]])
            with killed(victim):
                cluster.generate("once more", ask)
            with pytest.raises(
                ClusterError, match=rf"is loaded, but has lost {victim} \(.*Unload the model, then load it"
            ):
                cluster.load(tiny)
            assert victim in cluster.lost
            cluster.unload()
        cluster.load(tiny)
        assert cluster.generate("again", ask).token_ids == whole
        cluster.unload()
        cluster.load(str(smollm2))
        assert "Paris" in cluster.generate("The capital of France is", SamplingParams(max_tokens=8)).text


@contextmanager
def killed(node_id: str) -> Iterator[None]:
    """What is inside ends in time, with the one error that says how that engine's process ended."""
    began = time.monotonic()
    with pytest.raises(EngineLost, match=f"^{node_id}: was killed by SIGKILL") as caught:
        yield
    assert time.monotonic() - began < PROMPT_S
    assert len(caught.value.lines()) <= 2
