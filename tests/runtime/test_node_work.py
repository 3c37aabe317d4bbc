"""What a node says of its work: in heartbeats, in its status, and span by span."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from mlxcel_nb.runtime import status
from mlxcel_nb.runtime.commands import Unload
from mlxcel_nb.runtime.node import Node
from mlxcel_nb.runtime.spans import BYTES, MOST, Kind, read_spans
from mlxcel_nb.util import times
from tests.net.helpers import run
from tests.runtime.nodes import answer, linked, running
from tests.runtime.test_node_peers import WAIT_S, node, peer, ports
from tests.waiting import until


def test_a_frozen_generation_thread_shows_as_stalled_in_the_status_of_all_who_hear_its_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 27: its loop answers every ping meanwhile, so nobody takes it for dead."""
    monkeypatch.setattr(times, "HEARTBEAT_S", 0.3)
    monkeypatch.setattr(times, "STEP_S", 0.5)
    thawed, at = threading.Event(), ports("a", "b", "c")

    def freeze(worker: object) -> None:
        worker.activity = "decode"  # type: ignore[attr-defined]
        thawed.wait(60)
        worker.leave()  # type: ignore[attr-defined]

    with (
        node("a", at["a"], {"b": at["b"]}) as a,
        node("b", at["b"], {"a": at["a"], "c": at["c"]}) as b,
        node("c", at["c"], {"b": at["b"]}) as c,
    ):
        assert until(lambda: peer(a, "b")["state"] == peer(c, "b")["state"] == "alive", WAIT_S)
        worker = b._worker
        worker.post(Unload(lambda: freeze(worker)))
        try:
            assert until(lambda: peer(a, "b")["state"] == peer(c, "b")["state"] == "stalled", WAIT_S)
            assert "no progress for" in peer(a, "b")["reason"]
            told = b.status()
            assert told["activity"].startswith("stalled: no progress for") and told["activity"].endswith("in decode")
            assert peer(b, "a")["state"] == "alive" and a.status()["stalled"] == "", "it is nobody else's trouble"
        finally:
            thawed.set()
        assert until(lambda: peer(a, "b")["state"] == peer(c, "b")["state"] == "alive", WAIT_S)
        assert until(lambda: b.status()["activity"] == "idle", WAIT_S)


def test_a_node_without_a_model_says_how_long_its_steps_may_take() -> None:
    at = ports("a", "b")
    with node("a", at["a"], {"b": at["b"]}) as a, node("b", at["b"], {"a": at["a"]}):
        assert until(lambda: peer(a, "b").get("load"), WAIT_S)
        assert peer(a, "b")["load"] == {"step_s": times.STEP_S}


def test_a_router_reads_spans_from_a_number_on_and_nobody_else_does() -> None:
    async def case(made: Node) -> None:
        spans = made._worker.spans
        for step in range(MOST + 100):
            spans.add(Kind.STEP, 1.0, 2.0, 7, step, 3, 4, True)
        async with linked(made, "router-00000001", "router") as router:
            told = (await answer(router, {"type": "spans", "id": "s", "since": 0}))["spans"]
            assert (told["first"], told["next"]) == (0, MOST)
            assert told["kinds"][Kind.WAIT_HIDDEN] == "wait hidden" and told["clock_s"] > 0
            rest = (await answer(router, {"type": "spans", "id": "t", "since": told["next"]}))["spans"]
            assert [each.step for each in read_spans(rest["data"])] == list(range(MOST, MOST + 100))
            assert (await answer(router, {"type": "spans", "id": "u"}))["error"]["code"] == "wire"
            work = (await answer(router, {"type": "status", "id": "v"}))["status"]["work"]
            assert (work["spans"], work["spans_bytes"]) == (MOST + 100, BYTES)
            assert work["seconds"]["step"] == MOST + 100 and work["latest"]["results"] == 256
            assert work["engine"] is None, "it leads no model"
        async with linked(made, "other", "engine") as stranger:
            refused = await answer(stranger, {"type": "spans", "id": "w", "since": 0})
            assert "may not send 'spans'" in refused["error"]["cause"]

    with running("n1") as made:
        run(case(made))


def test_a_thread_that_hears_frames_of_a_slow_link_is_not_still() -> None:
    """Its step may take longer than `step_s`: deadlines move along while bytes do."""
    with running("n1") as made:
        worker = made._worker
        before, moved = status.progress(worker), status.moved_s(worker)
        link = SimpleNamespace(moves=7, watched_until=moved + 100)
        worker.instance = SimpleNamespace(fabric=SimpleNamespace(links={1: link}))  # type: ignore[assignment]
        try:
            assert status.progress(worker) == before + 7 and status.moved_s(worker) == moved + 100
        finally:
            worker.instance = None
