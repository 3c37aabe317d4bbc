"""What the server does before it needs a model: who is let in, what may be sent, how errors look. No engine runs."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import ipaddress
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.serve import connection, edge
from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.server import ApiServer
from tests.serve.callers import ask, post, raw, response

KEY = "key-" + "k" * 32
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
PAGE = "http://localhost:8888"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(Served(names=["m"]), port=0, origins=[PAGE]) as server:
        yield server


def error_of(answer: tuple[int, dict[str, str], Any]) -> dict[str, Any]:
    """An answer's error, which has OpenAI's shape."""
    status, headers, body = answer
    assert headers["content-type"] == "application/json" and set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return {"status": status, **error}


def test_before_there_is_a_model_health_says_so_at_once(server: ApiServer) -> None:
    """Case 33."""
    status, headers, body = ask(server, "GET", "/health")
    assert (status, body) == (503, {"status": "unavailable", "reason": "the engines are starting"})
    assert int(headers["retry-after"]) > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_before_there_is_a_model_requests_are_told_when_to_come_again(server: ApiServer, path: str) -> None:
    answer = ask(server, "POST", path, CHAT)
    assert error_of(answer)["status"] == 503 and error_of(answer)["code"] == "model_not_loaded"
    assert int(answer[1]["retry-after"]) > 0


def test_a_path_that_is_not_there_and_a_method_that_does_not_fit(server: ApiServer) -> None:
    assert error_of(ask(server, "GET", "/v1/nothing"))["status"] == 404
    assert error_of(ask(server, "GET", "/"))["code"] == "unknown_url"
    answer = ask(server, "GET", "/v1/chat/completions")
    assert error_of(answer)["status"] == 405 and answer[1]["allow"] == "POST"
    assert error_of(ask(server, "DELETE", "/v1/models/m"))["status"] == 405


def test_models_are_named(server: ApiServer) -> None:
    status, _, body = ask(server, "GET", "/v1/models")
    assert status == 200 and [model["id"] for model in body["data"]] == ["m"]
    assert ask(server, "GET", "/v1/models/m")[2]["object"] == "model"
    assert error_of(ask(server, "GET", "/v1/models/a/b"))["code"] == "model_not_found"


def test_embeddings_are_not_made_up(server: ApiServer) -> None:
    answer = ask(server, "POST", "/v1/embeddings", {"model": "m", "input": "x"})
    assert error_of(answer)["status"] == 501 and answer[1]["x-should-retry"] == "false"


def test_a_body_that_is_no_json_is_refused(server: ApiServer) -> None:
    for body in (b"", b"{", b"[1]", b"\xff\xfe"):
        assert error_of(ask(server, "POST", "/v1/completions", body))["status"] == 400


def test_a_body_that_is_too_large_is_refused_before_and_while_it_comes(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "MAX_BODY", 1000)
    assert error_of(ask(server, "POST", "/v1/completions", b"x" * 1001))["status"] == 413
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with raw(server, chunked + b"400\r\n" + b"x" * 0x400 + b"\r\n") as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_bodies_that_come_at_once_have_a_limit_together(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "MAX_BODIES", 1000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900\r\nexpect: 100-continue\r\n\r\n"
    with raw(server, head) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 100 "), "it is being read"
        answer = ask(server, "POST", "/v1/completions", b"x" * 200)
        assert error_of(answer)["status"] == 429 and int(answer[1]["retry-after"]) > 0
    # Its room is free again as soon as the server has seen it go.
    for _ in range(100):
        if ask(server, "POST", "/v1/completions", b"x" * 200)[0] == 400:
            return
    raise AssertionError("the room of a body that was cut off is never given back")


def test_a_body_that_stays_half_sent_is_given_up(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "BODY_S", 0.2)
    with raw(server, post("/v1/completions", CHAT)[:-5]) as sock:
        assert sock.recv(4096).startswith(b"HTTP/1.1 408 ")
        while sock.recv(4096):
            pass


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "])
def test_a_head_that_does_not_come_is_given_up(server: ApiServer, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    with raw(server, data) as sock, contextlib.suppress(ConnectionResetError):
        assert sock.recv(4096) == b""


def test_a_second_request_on_a_connection_has_its_own_time(server: ApiServer) -> None:
    whole = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with raw(server, whole) as sock:
        assert response(sock)[0] == 503
        sock.sendall(whole[:10])
        sock.sendall(whole[10:])
        assert response(sock)[0] == 503


def test_what_is_no_http_does_not_hurt(server: ApiServer) -> None:
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 70_000):
        with raw(server, junk) as sock, contextlib.suppress(ConnectionResetError):
            sock.recv(4096)
    assert ask(server, "GET", "/health")[0] == 503


@pytest.mark.parametrize("data", [b"hello\r\n\r\n", b"GET\r\n\r\n", b"GET /" + b"x" * (connection.HEAD_BYTES + 1)])
def test_what_is_no_http_is_refused_in_openais_shape(server: ApiServer, data: bytes) -> None:
    with raw(server, data) as sock:
        found = http.client.HTTPResponse(sock)
        found.begin()
        headers = {name.lower(): value for name, value in found.getheaders()}
        error = error_of((found.status, headers, json.loads(found.read())))
        assert (error["status"], error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")
        assert "65536 bytes" in error["message"] and headers["connection"] == "close"
        assert sock.recv(1) == b"", "it is over"


def test_names_and_pages_that_are_not_ours_are_kept_out(server: ApiServer) -> None:
    """Case 66: DNS rebinding, and a page from elsewhere."""
    assert error_of(ask(server, "GET", "/health", headers={"host": "evil.example"}))["status"] == 403
    answer = ask(server, "POST", "/v1/completions", CHAT, {"origin": "http://evil.example"})
    assert error_of(answer)["status"] == 403 and "access-control-allow-origin" not in answer[1]
    assert "--allow-origin http://evil.example" in error_of(answer)["message"]
    of_a_file = error_of(ask(server, "POST", "/v1/completions", CHAT, {"origin": "null"}))
    assert of_a_file["status"] == 403 and "--allow-origin" not in of_a_file["message"], "which would refuse it"
    assert ask(server, "OPTIONS", "/v1/completions", headers={"origin": "http://evil.example"})[0] == 403
    assert ask(server, "GET", "/health", headers={"host": "localhost"})[0] == 503


def test_a_page_that_is_allowed_may_ask_and_read(server: ApiServer) -> None:
    wants = {"origin": PAGE, "access-control-request-headers": "authorization,content-type"}
    status, headers, _ = ask(server, "OPTIONS", "/v1/completions", headers=wants)
    assert status == 204 and headers["access-control-allow-headers"] == "authorization,content-type"
    status, headers, _ = ask(server, "POST", "/v1/completions", CHAT, {"origin": PAGE})
    assert status == 503 and headers["access-control-allow-origin"] == PAGE


def test_with_a_key_only_health_is_open_to_others(no_traces: list[str]) -> None:
    with ApiServer(Served(), port=0, key=Secret(KEY.encode())) as server:
        assert ask(server, "GET", "/health")[0] == 503
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            answer = ask(server, "GET", path)
            assert error_of(answer)["status"] == 401 and answer[1]["www-authenticate"] == "Bearer"
        assert ask(server, "POST", "/v1/completions", CHAT, {"authorization": "Bearer wrong"})[0] == 401
        good = {"authorization": f"Bearer {KEY}"}
        assert ask(server, "GET", "/v1/models", headers=good)[0] == 200
        assert ask(server, "GET", "/metrics", headers=good)[0] == 200
        assert ask(server, "POST", "/v1/completions", CHAT, good)[0] == 503
        assert KEY not in repr(vars(server)) + repr(server)
    assert not [line for line in no_traces if KEY in line]


@pytest.fixture
def no_traces(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Every line that is logged at any level."""
    caplog.set_level(0)
    return caplog.messages


def test_metrics_tell_what_was_answered(server: ApiServer) -> None:
    ask(server, "GET", "/v1/made-up-by-a-caller")
    status, headers, page = ask(server, "GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain")
    assert 'mlxcel_http_responses_total{route="other",status="404"}' in page and "made-up" not in page
    assert "mlxcel_ready 0.0" in page


def test_a_host_beyond_this_computer_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        ApiServer(Served(), host="0.0.0.0", port=0)  # for a reason: it is refused


def test_a_port_that_is_taken_is_named(server: ApiServer) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"port {port} in use"):
        ApiServer(Served(), port=port)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    private, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(here, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    Path(cert).write_bytes(made.public_bytes(Encoding.PEM))
    Path(key).write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return cert, key


def test_tls(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with ApiServer(Served(), port=0, certificate=cert, private_key=key) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=cert)
        assert ask(server, "GET", "/health", context=trusting)[0] == 503
        with pytest.raises(ssl.SSLError):
            ask(server, "GET", "/health", context=ssl.create_default_context())


def test_files_of_tls_that_do_not_fit_are_refused(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    (tmp_path / "junk.pem").write_text("junk")
    for wrong in ((cert, str(tmp_path / "absent")), (str(tmp_path / "junk.pem"), key), (None, key), (cert, None)):
        with pytest.raises(ConfigError):
            ApiServer(Served(), port=0, certificate=wrong[0], private_key=wrong[1])


def test_a_server_that_was_stopped_leaves_its_port() -> None:
    server = ApiServer(Served(), port=0).start()
    port = int(server.url.rsplit(":", 1)[1])
    server.stop()
    assert not server.running
    ApiServer(Served(), port=port).stop()


def test_a_packed_body_is_refused_as_such(server: ApiServer) -> None:
    answer = ask(server, "POST", "/v1/chat/completions", b"\x1f\x8b", {"content-encoding": "gzip"})
    assert answer[0] == 415 and "gzip" in error_of(answer)["message"]
