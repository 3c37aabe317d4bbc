"""Case 22 as a table: every end there is, of streams and of whole answers, on ranks and in stages; each comes once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.server import ApiServer
from tests.cluster.harness import nothing_left, strike, wait_until
from tests.serve.callers import PATIENCE_S, ask, events, post, raw, response
from tests.serve.test_streams import ENDLESS, figures, in_flight, read_all, read_until
from tests.tiny import make_tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

END_OF_TEXT = 256
ASKED = {"prompt": "a beginning", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=[{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def server(request: pytest.FixtureRequest, tiny: Path) -> Iterator[ApiServer]:
    with nothing_left(Cluster(2)) as cluster, ApiServer(Served(cluster), port=0) as server:
        cluster.load(str(tiny), **request.param)
        yield server


def ends(server: ApiServer) -> dict[str, float]:
    """How many answers have ended, by reason."""
    name = 'mlxcel_answers_total{finish_reason="'
    return {key.removeprefix(name).rstrip('"}'): n for key, n in figures(server).items() if key.startswith(name)}


def answered(server: ApiServer, body: dict[str, Any], stream: bool) -> tuple[str, list[str]]:
    """Its text, and all reasons that were given."""
    status, _, got = ask(server, "POST", "/v1/completions", {**body, "stream": stream})
    assert status == 200
    if not stream:
        (choice,) = got["choices"]
        return choice["text"], [choice["finish_reason"]]
    *pieces, done = events(got)
    assert done == "[DONE]"
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert not choices[-1]["text"] or choices[-1]["finish_reason"]
    return "".join(each["text"] for each in choices), [r for each in choices if (r := each["finish_reason"])]


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("end", ["end of text", "stop string", "length"])
def test_an_answer_ends_once_for_its_reason(server: ApiServer, end: str, stream: bool) -> None:
    body = {**ASKED, "ignore_eos": end != "end of text"}
    expected, reason = "", "stop"
    if end == "end of text":
        body["logit_bias"] = {str(END_OF_TEXT): 100}
    else:
        expected, reason = answered(server, body, False)[0], "length"
    if end == "stop string":
        body["stop"] = [expected[3:5]]
        expected, reason = expected[: expected.index(expected[3:5])], "stop"
    before = ends(server)
    assert answered(server, body, stream) == (expected, [reason])
    after = ends(server)
    assert {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)} == {reason: 1}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_one_that_nobody_waits_for_any_more_ends_once_as_cancelled(server: ApiServer, stream: bool) -> None:
    before, made = ends(server), figures(server)["mlxcel_generated_tokens_total"]
    with raw(server, post("/v1/completions", {**ENDLESS, "stream": stream})) as sock:
        wait_until(lambda: in_flight(server) == 1, deadline_s=PATIENCE_S, what="the request to be under way")
        if stream:
            read_until(sock, b'"text":')
    wait_until(lambda: in_flight(server) == 0, deadline_s=PATIENCE_S, what="its end")
    after = ends(server)
    assert {key: n - before.get(key, 0) for key, n in after.items() if n != before.get(key, 0)} == {"cancelled": 1}
    if stream:
        assert figures(server)["mlxcel_generated_tokens_total"] > made, "what was made of it counts"


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_the_death_of_a_node_is_one_error_event_or_an_error_as_the_answer(layout: dict[str, int], tiny: Path) -> None:
    with nothing_left(Cluster(2)) as cluster, ApiServer(Served(cluster), port=0) as server:
        cluster.load(str(tiny), **layout)  # type: ignore[arg-type]
        whole: list[tuple[int, bytes]] = []

        def wait_for_the_whole() -> None:
            with raw(server, post("/v1/completions", {**ENDLESS, "stream": False}, connection="close")) as sock:
                whole.append(response(sock))

        waiting = threading.Thread(target=wait_for_the_whole)
        with raw(server, post("/v1/completions", ENDLESS, connection="close")) as sock:
            read_until(sock, b'"text":')
            waiting.start()
            wait_until(lambda: in_flight(server) == 2, deadline_s=PATIENCE_S, what="both to be under way")
            strike(cluster, "engine-1", signal.SIGKILL)
            *pieces, last = events(read_all(sock))
        waiting.join(PATIENCE_S)
        assert "engine-1" in last["error"]["message"]
        assert not any(piece == "[DONE]" or "error" in piece for piece in pieces)
        assert not any(choice["finish_reason"] for piece in pieces for choice in piece["choices"])
        ((status, body),) = whole
        assert status == 503 and b"engine-1" in body
        assert ends(server) == {"error": 2}


def test_a_replica_that_is_lost_is_told_while_the_other_answers(tiny: Path) -> None:
    with nothing_left(Cluster(2)) as cluster, ApiServer(Served(cluster), port=0) as server:
        cluster.load(str(tiny), dp=2)
        assert "lost" not in ask(server, "GET", "/health")[2]
        strike(cluster, "engine-1", signal.SIGKILL)
        wait_until(lambda: "SIGKILL" in cluster.lost.get("engine-1", ""), deadline_s=10, what="the loss to be known")
        status, _, told = ask(server, "GET", "/health")
        assert status == 200 and "SIGKILL" in told["lost"]["engine-1"]
        assert answered(server, {**ASKED, "ignore_eos": True}, False)[1] == ["length"]
