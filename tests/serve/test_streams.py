"""Streams whose reader is slow or gone, or whose engines die; on raw connections, over a model that does not stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxcel_nb.client.cluster import Cluster
from mlxcel_nb.serve import app, replies
from mlxcel_nb.serve.connection import Connection
from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.server import ApiServer
from tests.cluster.harness import activity, nothing_left, strike, wait_until
from tests.serve.callers import PATIENCE_S, ask, events, post, raw
from tests.tiny import make_tiny

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

ENDLESS = {"prompt": "x", "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "x", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def figures(server: ApiServer) -> dict[str, float]:
    page = ask(server, "GET", "/metrics")[2]
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def in_flight(server: ApiServer) -> float:
    return sum(value for name, value in figures(server).items() if name.startswith("mlxcel_answers_in_flight"))


def is_idle(server: ApiServer) -> bool:
    """Nothing is under way, here or on any engine."""
    cluster = server.served.cluster
    assert cluster is not None
    return in_flight(server) == 0 and all(activity(cluster, node.node_id) == "idle" for node in cluster.nodes)


def read_until(sock: socket.socket, word: bytes) -> bytes:
    got = b""
    while word not in got:
        more = sock.recv(65536)
        assert more, f"{word!r} did not come"
        got += more
    return got


def read_all(sock: socket.socket) -> str:
    got = b""
    while more := sock.recv(65536):
        got += more
    return got.decode()


@pytest.fixture(autouse=True)
def leaves_nothing_under_way(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "tiny_server" in request.fixturenames:
        server: ApiServer = request.getfixturevalue("tiny_server")
        wait_until(lambda: is_idle(server), deadline_s=PATIENCE_S, what="everything to be over")


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_leaves_has_his_request_stopped(tiny_server: ApiServer, stream: bool) -> None:
    """Case 32."""
    before = figures(tiny_server).get('mlxcel_answers_total{finish_reason="cancelled"}', 0)
    with raw(tiny_server, post("/v1/completions", {**ENDLESS, "stream": stream, "n": 4})) as sock:
        wait_until(lambda: in_flight(tiny_server) == 4, deadline_s=PATIENCE_S, what="the requests to be under way")
        if stream:
            read_until(sock, b'"text":')
    wait_until(lambda: is_idle(tiny_server), deadline_s=PATIENCE_S, what="the engines to stop")
    assert figures(tiny_server)['mlxcel_answers_total{finish_reason="cancelled"}'] > before


@pytest.fixture
def wordy_server(tiny_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """Its model has so long a name that few tokens fill every buffer of a reader who stops."""
    made = Connection.connection_made

    def narrow(self: Connection, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", narrow)
    with ApiServer(Served(tiny_server.served.cluster, names=["m" * 8000]), port=0) as server:
        yield server


def test_who_does_not_read_holds_nobody_up_and_costs_little(wordy_server: ApiServer) -> None:
    """Case 31."""
    first = ask(wordy_server, "POST", "/v1/completions", SHORT)
    process = psutil.Process()
    before = process.memory_info().rss
    wanted = {**ENDLESS, "max_tokens": 200}
    with raw(wordy_server, post("/v1/completions", wanted, connection="close"), receive_bytes=1 << 16) as sock:
        read_until(sock, b'"text":')
        wait_until(lambda: in_flight(wordy_server) == 0, deadline_s=PATIENCE_S, what="the engines to have made it all")
        assert ask(wordy_server, "POST", "/v1/completions", SHORT)[2]["choices"] == first[2]["choices"]
        assert process.memory_info().rss - before < 20 << 20
        *pieces, done = events(read_all(sock))
    assert done == "[DONE]" and pieces[-1]["choices"][0]["finish_reason"] == "length"
    assert len(pieces) < 190, "what was not taken came together"
    whole = ask(wordy_server, "POST", "/v1/completions", {**wanted, "stream": False})[2]["choices"][0]["text"]
    assert whole.endswith("".join(piece["choices"][0]["text"] for piece in pieces))


def test_who_never_reads_is_cut_off(wordy_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 31."""
    monkeypatch.setattr(replies, "READER_S", 0.3)
    wanted = {**ENDLESS, "max_tokens": 200}
    connections = wordy_server._uvicorn.server_state.connections
    with raw(wordy_server, post("/v1/completions", wanted), receive_bytes=1 << 16) as sock:
        read_until(sock, b'"text":')
        wait_until(lambda: not connections, deadline_s=PATIENCE_S, what="the reader to be given up")
        with contextlib.suppress(ConnectionResetError):
            assert "[DONE]" not in read_all(sock), "what the system held, and no more"
    assert in_flight(wordy_server) == 0


def test_a_silent_stream_is_kept_open(tiny_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "STATUS_S", 0.05)
    monkeypatch.setattr(replies, "QUIET_S", 0.05)
    with raw(tiny_server, post("/v1/completions", ENDLESS)) as first:
        read_until(first, b'"text":')
        with raw(tiny_server, post("/v1/completions", {**ENDLESS, "max_tokens": 3}, connection="close")) as second:
            head = read_until(second, b"\n\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            first.close()
            assert events(read_all(second))[-1] == "[DONE]"


def test_more_requests_than_there_is_room_for_are_told_to_come_again(
    tiny_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 26."""
    monkeypatch.setattr(app, "MAX_IN_FLIGHT", 1)
    with raw(tiny_server, post("/v1/completions", ENDLESS)) as sock:
        read_until(sock, b'"text":')
        status, headers, body = ask(tiny_server, "POST", "/v1/completions", SHORT)
        assert (status, body["error"]["type"]) == (429, "rate_limit_error") and int(headers["retry-after"]) > 0
    wait_until(lambda: in_flight(tiny_server) == 0, deadline_s=PATIENCE_S, what="its end")
    assert ask(tiny_server, "POST", "/v1/completions", SHORT)[0] == 200


def test_a_stream_for_an_event_source_is_posted_and_then_fetched_once(tiny_server: ApiServer) -> None:
    wanted = {"url": "/v1/completions", "body": SHORT}
    status, _, ticket = ask(tiny_server, "POST", "/v1/events", wanted)
    assert (status, ticket["object"]) == (201, "event_stream")
    status, headers, text = ask(tiny_server, "GET", ticket["url"])
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert events(text)[-1] == "[DONE]" and events(text)[-2]["choices"][0]["finish_reason"] == "length"
    assert ask(tiny_server, "GET", ticket["url"])[2]["error"]["code"] == "stream_gone"


def test_a_stream_that_is_not_fetched_in_time_is_gone(tiny_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "TICKET_S", 0.0)
    _, _, ticket = ask(tiny_server, "POST", "/v1/events", {"url": "/v1/completions", "body": SHORT})
    assert ask(tiny_server, "GET", ticket["url"])[0] == 404
    monkeypatch.setattr(app, "MAX_TICKETS", 0)
    assert ask(tiny_server, "POST", "/v1/events", {"url": "/v1/completions", "body": SHORT})[0] == 429


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({}, "url"),
        ({"url": "/health", "body": {}}, "url"),
        ({"url": "/v1/completions"}, "body"),
        ({"url": "/v1/completions", "body": {"prompt": 5}}, "prompt"),
        ({"url": "/v1/completions", "body": SHORT, "method": "POST"}, "method"),
    ],
)
def test_what_is_wrong_with_a_stream_is_told_before_it_is_fetched(
    tiny_server: ApiServer, wanted: dict[str, Any], param: str
) -> None:
    status, _, body = ask(tiny_server, "POST", "/v1/events", wanted)
    assert (status, body["error"]["param"]) == (400, param)


def test_a_server_that_stops_ends_its_streams_with_a_reason(tiny_server: ApiServer) -> None:
    server = ApiServer(Served(tiny_server.served.cluster), port=0).start()
    with raw(server, post("/v1/completions", {**ENDLESS, "n": 8}, connection="close")) as sock:
        read_until(sock, b'"text":')
        server.stop(grace_s=0.1)
        *_, last = events(read_all(sock))
    assert last["error"]["code"] == "stopping"
    assert not server.running


def test_an_unloaded_model_ends_its_streams_and_another_one_is_served(tmp_path: Path) -> None:
    with nothing_left(Cluster(1)) as cluster, ApiServer(Served(cluster), port=0) as server:
        assert ask(server, "GET", "/health")[2]["reason"] == "no model is loaded"
        cluster.load(str(make_tiny(tmp_path / "first")))
        assert ask(server, "GET", "/v1/models")[2]["data"][0]["id"] == "first"
        with raw(server, post("/v1/completions", ENDLESS, connection="close")) as sock:
            read_until(sock, b'"text":')
            cluster.unload()
            assert events(read_all(sock))[-1]["error"]["message"]
        assert ask(server, "POST", "/v1/completions", SHORT)[0] == 503
        cluster.load(str(make_tiny(tmp_path / "second", seed=1)))
        assert ask(server, "POST", "/v1/completions", {**SHORT, "model": "second"})[2]["model"] == "second"
        assert ask(server, "POST", "/v1/completions", {**SHORT, "model": "first"})[0] == 404
    assert ask_is_refused(server)


def ask_is_refused(server: ApiServer) -> bool:
    try:
        ask(server, "GET", "/health")
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("victim", ["engine-0", "engine-1"])
def test_an_engine_that_dies_is_an_event_and_then_a_reason_of_health(tmp_path: Path, victim: str) -> None:
    """Cases 22 and 29: an error event, no finish_reason and no end word; later requests are told at once."""
    folder = make_tiny(tmp_path / "tiny")
    with nothing_left(Cluster(2)) as cluster, ApiServer(Served(cluster), port=0) as server:
        cluster.load(str(folder), pp=2)
        assert ask(server, "GET", "/health")[0] == 200
        with raw(server, post("/v1/completions", {**ENDLESS, "n": 3}, connection="close")) as sock:
            read_until(sock, b'"text":')
            strike(cluster, victim, signal.SIGKILL)
            rest = events(read_all(sock))
        assert victim in rest[-1]["error"]["message"] and rest[-1]["error"]["type"] == "service_unavailable"
        assert not any(choice["finish_reason"] == "error" for piece in rest[:-1] for choice in piece["choices"])
        status, headers, body = ask(server, "GET", "/health")
        assert status == 503 and victim in body["reason"]
        status, headers, body = ask(server, "POST", "/v1/completions", SHORT)
        assert status == 503 and int(headers["retry-after"]) > 0 and victim in body["error"]["message"]
        assert json.dumps(ask(server, "GET", "/metrics")[2]) and figures(server)["mlxcel_ready"] == 0
        wait_until(lambda: in_flight(server) == 0, deadline_s=PATIENCE_S, what="nothing to be under way")


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"messages": [{"role": [], "content": "x"}]}', "messages.0.role"),
        (b'{"messages": [{"role": {}, "content": "x"}]}', "messages.0.role"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1' + b"0" * 400 + b"}", "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"1": 1' + b"0" * 400 + b"}}", "logit_bias"),
        (b'{"messages": [{"role": "user", "content": "x"}], "user": "\xed\xa0\x80"}', None),
        (b'{"messages": [{"role": "user", "content": "x"}], "\xed\xa0\x80": 1}', None),
        ('{"messages": [{"role": "user", "content": "x"}], "user": "\\ud800"}'.encode("utf-16"), None),
        (b'{"messages": [{"role": "user", "content": "x", "more": ' + b"[" * 900 + b"]" * 900 + b"}]}", None),
        (b'{"messages": [' + b'{"role": "user", "content": ""},' * 20000 + b'{"role": "user"}]}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "' + b"n" * 1000000 + b'": 1}', "n" * 60),
    ],
)
def test_what_cannot_be_is_the_callers_mistake(tiny_server: ApiServer, raw: bytes, param: str | None) -> None:
    status, _, body = ask(tiny_server, "POST", "/v1/chat/completions", raw)
    assert status == 400, body
    assert body["error"]["param"] == param and body["error"]["type"] == "invalid_request_error"


def test_an_origin_that_is_none_is_kept_out(tiny_server: ApiServer) -> None:
    status, _, body = ask(tiny_server, "GET", "/v1/models", headers={"origin": "http://[::1"})
    assert (status, body["error"]["code"]) == (403, "origin")
