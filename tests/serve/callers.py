"""What tests of the server share: plain requests, raw sockets, and the events of a stream."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from mlxcel_nb.serve.server import ApiServer

PATIENCE_S = 40.0


def ask(
    server: ApiServer,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    context: ssl.SSLContext | None = None,
) -> tuple[int, dict[str, str], Any]:
    """One request: status, headers (names in lower case), and the body, which is parsed where it is JSON."""
    where = urlsplit(server.url)
    connection: http.client.HTTPConnection
    if where.scheme == "https":
        connection = http.client.HTTPSConnection(where.hostname, where.port, timeout=PATIENCE_S, context=context)
    else:
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE_S)
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, raw, headers or {})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    found = {name.lower(): value for name, value in response.getheaders()}
    is_json = found.get("content-type", "").startswith("application/json")
    return response.status, found, json.loads(text) if is_json else text.decode()


@contextmanager
def raw(server: ApiServer, data: bytes, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    """A connection on which `data` has been sent; with little room for what comes back if `receive_bytes` says so."""
    where = urlsplit(server.url)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(PATIENCE_S)
    with sock:
        sock.connect((where.hostname, where.port))
        sock.sendall(data)
        yield sock


def response(sock: socket.socket) -> tuple[int, bytes]:
    """The next response on a raw connection: its status and its body."""
    found = http.client.HTTPResponse(sock)
    found.begin()
    return found.status, found.read()


def post(path: str, body: Any, **headers: str) -> bytes:
    """The bytes of a request."""
    text = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(text)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + text


def events(text: str) -> list[Any]:
    """The data of a stream's events; comments are left out, and `[DONE]` is a word of its own."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
