"""The server's outermost layer: who may come in, how much he may bring, and that every error has OpenAI's shape.

On the server's loop; trusts nobody. The rules are those of `access`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.serve import failures
from mlxcel_nb.serve.access import Access
from mlxcel_nb.serve.failures import ApiError
from mlxcel_nb.serve.neighbours import is_stranger, user_of
from mlxcel_nb.serve.replies import Message, ReaderGone, send_error
from mlxcel_nb.util.log import get_logger, trail

log = get_logger("serve.edge")

MAX_BODY = 8 << 20
"""Bytes of a body: twice what an engine lets wait, for JSON's escapes."""

MAX_BODIES = 64 << 20
"""Bytes of all bodies that are being read at once."""

BODY_S = 30.0
"""From a request's head to the end of its body."""

OPEN = ("/health",)
"""Paths that need no key: load balancers have none."""

TICKETS = "/v1/events/"
"""What follows is a key of its own, which only somebody with the server's key was given."""

Told = Callable[[str, int], None]


class Edge:
    """Lets a request in, or tells why not.

    Args:
        told: takes the route and status of each response.
    """

    def __init__(self, app: ASGIApp, *, access: Access, told: Told) -> None:
        self._app = app
        self._access = access
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        outgoing, started = self._cors(headers), False

        async def passing(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._told(_route_of(scope), message["status"])
                message = {**message, "headers": [*message["headers"], *outgoing]}
            await send(message)

        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS":
                await _preflight(passing, headers, bool(outgoing))
                return
            await self._app(scope, receive, passing)
        except ReaderGone:
            abort = scope.get("state", {}).get("abort")
            if abort is not None:
                abort()
        except Exception as error:  # noqa: BLE001 - one bad request never ends the server
            failure = error if isinstance(error, ApiError) else _failure_of(error)
            if not started:
                await send_error(passing, failure)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        self._check_neighbour(scope)
        self._access.check_host(headers.get("host"))
        self._access.check_origin(headers.get("origin"), headers["host"])
        path = scope["path"]
        free = path in OPEN or path.startswith(TICKETS) or scope["method"] == "OPTIONS"
        if not free:
            self._access.check_key(headers)
        if (encoding := headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(415, f"content-encoding {encoding} is not read: send the body as it is")

    def _check_neighbour(self, scope: Scope) -> None:
        """Turn other users of this computer away, where there is no key that tells callers apart."""
        if self._access.key is not None:
            return
        known = scope["state"]["caller"]
        if "stranger" not in known:
            known["stranger"] = is_stranger(user_of(scope["client"], scope["server"]))
        if known["stranger"]:
            what = "this server is another user's; its owner can start it with --api-key-file"
            raise ApiError(403, what, code="other_user")

    def _cors(self, headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
        """What lets a page read our answer, where it may."""
        origin, host = headers.get("origin"), headers.get("host")
        if origin is None or host is None or not self._access.allows_origin(origin, host):
            return []
        exposed = (b"access-control-expose-headers", b"x-request-id, retry-after")
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin"), exposed]


async def _preflight(send: Send, headers: dict[str, str], allowed: bool) -> None:
    """A browser asks, before a page's request, whether it may send it."""
    answer = [(b"allow", b"GET, POST, OPTIONS")]
    if allowed:
        wanted = headers.get("access-control-request-headers", "")
        answer += [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", wanted.encode("latin-1")),
            (b"access-control-max-age", b"600"),
        ]
        if headers.get("access-control-request-private-network") == "true":
            answer.append((b"access-control-allow-private-network", b"true"))
    await send({"type": "http.response.start", "status": 204, "headers": answer})
    await send({"type": "http.response.body", "body": b""})


def _failure_of(error: Exception) -> ApiError:
    if isinstance(error, MlxcelError):
        return failures.of(error)
    if isinstance(error, RecursionError):
        return failures.refused("the body is nested too deeply")
    log.error("a request failed: %s", trail(error))
    return ApiError(500, "the server made a mistake; its log says where")


ROUTES = (
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/events",
    "/health",
    "/metrics",
)


def _route_of(scope: Scope) -> str:
    """The path as it counts in metrics: one of few, whatever callers make up."""
    path: str = scope["path"]
    if path in ROUTES:
        return path
    return next((f"{route}/..." for route in ("/v1/models", "/v1/events") if path.startswith(f"{route}/")), "other")


class Bodies:
    """Reads bodies, and knows how much of them is held."""

    def __init__(self) -> None:
        self._held = 0

    async def read(self, request: Request) -> bytes:
        """The whole body.

        Raises:
            ApiError: too large, too slow, or too much at once. ReaderGone: it was cut off.
        """
        try:
            declared = int(request.headers.get("content-length", "0"))
        except ValueError:
            declared = 0
        with self._counting() as count:
            count(declared)
            try:
                async with asyncio.timeout(BODY_S):
                    return await self._read(request.receive, declared, count)
            except TimeoutError:
                what = f"the body did not arrive within {BODY_S:g} s"
                raise ApiError(408, what, headers={"connection": "close"}) from None

    async def _read(self, receive: Receive, declared: int, count: Callable[[int], None]) -> bytes:
        body = bytearray()
        while True:
            message: Any = await receive()
            if message["type"] == "http.disconnect":
                raise ReaderGone
            body += message.get("body", b"")
            count(max(declared, len(body)))
            if not message.get("more_body", False):
                return bytes(body)

    @contextmanager
    def _counting(self) -> Iterator[Callable[[int], None]]:
        mine = 0

        def count(size: int) -> None:
            nonlocal mine
            if size > MAX_BODY:
                raise ApiError(413, f"the body has more than {MAX_BODY} bytes", code="body_too_large")
            if self._held - mine + size > MAX_BODIES:
                what = "other requests are being read, and there is no room for this one"
                raise ApiError(429, what, code="busy", retry_s=failures.BUSY_RETRY_S)
            self._held += size - mine
            mine = size

        try:
            yield count
        finally:
            self._held -= mine
