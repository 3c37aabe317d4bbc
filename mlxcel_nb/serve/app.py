"""The routes of the API, and what is done for each. On the server's loop."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlxcel_nb.serve import answers, failures, requests
from mlxcel_nb.serve.access import Access
from mlxcel_nb.serve.answering import Answering
from mlxcel_nb.serve.answers import Shape
from mlxcel_nb.serve.backlog import MAX_WAIT_S, Backlog
from mlxcel_nb.serve.edge import TICKETS, Bodies, Edge
from mlxcel_nb.serve.failures import ApiError, refused
from mlxcel_nb.serve.fields import Fields, body_of
from mlxcel_nb.serve.metrics import Metrics
from mlxcel_nb.serve.replies import send_stream, send_whole, unless_gone
from mlxcel_nb.serve.requests import Ask
from mlxcel_nb.serve.served import Served
from mlxcel_nb.serve.tools import Form
from mlxcel_nb.util.shares import has_room

MAX_IN_FLIGHT = 256
"""Requests that may be under way, those included that the engines let wait: bounds what they take here."""

TICKET_S = 60.0
"""A stream that was prepared is fetched within this time."""

MAX_TICKETS = 64

Parse = Callable[..., Ask]

GENERATORS: dict[str, Parse] = {"/v1/completions": requests.completion, "/v1/chat/completions": requests.chat}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request that can be begun: all that could be refused beforehand has been looked at."""

    ask: Ask
    name: str
    prompts: list[list[int]] = field(repr=False)
    form: Form | None
    caller: str


def caller_of(request: Request, body: dict[str, Any]) -> str:
    """Whose turn it is when it is this request's: OpenAI's `user` at an address, as a hash: engines know neither."""
    user, host = body.get("user"), request.client.host if request.client else ""
    return hashlib.sha256(f"{host}\n{user if isinstance(user, str) else ''}".encode()).hexdigest()[:16]


class Api:
    """The ASGI application of one server.

    Args:
        max_wait_s: who would wait longer for his first token is told to come again.
    """

    def __init__(self, served: Served, access: Access, *, max_wait_s: float = MAX_WAIT_S) -> None:
        self.served = served
        self.backlog = Backlog(max_wait_s)
        self.metrics = Metrics(served, self.backlog)
        self.live: set[Answering] = set()
        self._bodies = Bodies()
        self._tickets: dict[str, tuple[float, Job]] = {}
        self.app = Starlette(
            routes=[
                *(Route(path, self._generate, methods=["POST"]) for path in GENERATORS),
                Route("/v1/embeddings", self._embeddings, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/events", self._ticket, methods=["POST"]),
                Route(TICKETS + "{ticket}", self._events),
                Route("/health", self._health),
                Route("/metrics", self._page),
            ],
            middleware=[Middleware(Edge, access=access, told=self._told)],
            exception_handlers={HTTPException: _no_route},
        )

    def stop_all(self) -> None:
        """End what is under way with an error that says why."""
        for answering in self.live:
            answering.fail(failures.stopping())

    # -- answers -----------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> Reply:
        body = body_of(await self._bodies.read(request))
        return Reply(self, await self._job(request, request.url.path, body))

    async def _job(self, request: Request, path: str, body: dict[str, Any]) -> Job:
        self.served.check()
        caller = caller_of(request, body)
        self.check_room(caller)
        ask = GENERATORS[path](body, longest=self.served.longest)
        name = self.served.check_name(ask.model)
        prompts, form = await self.served.prepare(ask)
        return Job(ask=ask, name=name, prompts=prompts, form=form, caller=caller)

    def check_room(self, caller: str) -> None:
        """Refuse one more request of a caller who would wait too long, or has too many under way.

        Raises:
            ApiError: with a hint when to come again.
        """
        now = time.monotonic()
        if (retry_s := self.backlog.retry_s(caller, now)) is not None:
            ahead, wait_s = self.backlog.ahead(caller), self.backlog.wait_s(caller, now)
            what = f"{ahead} requests go before this one, which would wait for its first token for about {wait_s:.0f} s"
            raise ApiError(429, what, code="busy", retry_s=retry_s)
        own = sum(answering.caller == caller for answering in self.live)
        if not has_room(own, len(self.live), MAX_IN_FLIGHT):
            what = f"{len(self.live)} requests are under way, {own} of them yours"
            raise ApiError(429, what, code="busy", retry_s=failures.BUSY_RETRY_S)

    async def _ticket(self, request: Request) -> Response:
        """A browser's EventSource can only GET: what it is to be told of is posted beforehand."""
        fields = Fields(body_of(await self._bodies.read(request)))
        path, body = fields.one_of("url", GENERATORS), fields.object("body")
        fields.end()
        if path is None or body is None:
            raise refused("give the url of an endpoint and the body for it", "url" if path is None else "body")
        job = await self._job(request, path, body)
        now = time.monotonic()
        self._tickets = {ticket: kept for ticket, kept in self._tickets.items() if kept[0] > now}
        if len(self._tickets) >= MAX_TICKETS:
            what = f"{len(self._tickets)} streams are prepared and have not been fetched"
            raise ApiError(429, what, code="busy", retry_s=TICKET_S)
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = (now + TICKET_S, replace(job, ask=replace(job.ask, stream=True)))
        made = {"object": "event_stream", "url": f"{TICKETS}{ticket}", "expires_in": int(TICKET_S)}
        return JSONResponse(made, 201, _FRESH)

    async def _events(self, request: Request) -> Reply:
        deadline, job = self._tickets.pop(request.path_params["ticket"], (0.0, None))
        if job is None or deadline < time.monotonic():
            raise ApiError(404, "there is no such stream: it is over, or was not fetched in time", code="stream_gone")
        self.served.check()
        return Reply(self, job)

    async def _embeddings(self, _request: Request) -> Response:
        # Clients try a 501 again unless they are told not to.
        what = "the models served here make text; none of them gives embeddings"
        raise ApiError(501, what, code="unsupported", headers={"x-should-retry": "false"})

    # -- facts -------------------------------------------------------------------------------------

    async def _models(self, _request: Request) -> Response:
        return JSONResponse(answers.models_of(self.served.names, self.served.created), headers=_FRESH)

    async def _model(self, request: Request) -> Response:
        name = self.served.check_name(request.path_params["name"])
        return JSONResponse(answers.model_of(name, self.served.created), headers=_FRESH)

    async def _health(self, _request: Request) -> Response:
        if problem := self.served.problem():
            retry = {"retry-after": str(failures.AWAY_RETRY_S)}
            return JSONResponse({"status": "unavailable", "reason": problem}, 503, {**_FRESH, **retry})
        report = self.served.check()
        found: dict[str, Any] = {"status": "ok", "model": self.served.names[0], "layout": report.layout}
        if lost := self.served.lost:
            found["lost"] = lost  # of some replica; the others answer
        return JSONResponse(found, headers=_FRESH)

    async def _page(self, _request: Request) -> Response:
        return Response(self.metrics.page(), headers={**_FRESH, "content-type": CONTENT_TYPE_LATEST})

    def _told(self, route: str, status: int) -> None:
        self.metrics.responses.labels(route, str(status)).inc()


class Reply:
    """The ASGI response that answers a job."""

    def __init__(self, api: Api, job: Job) -> None:
        self._api = api
        self._job = job

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        api, job, ask = self._api, self._job, self._job.ask
        cluster = api.served.cluster
        if cluster is None:
            raise failures.away("there is no cluster any more")
        number = secrets.token_hex(12)
        shape = Shape(
            chat=ask.chat,
            id=f"chatcmpl-{number}" if ask.chat else f"cmpl-{number}",
            created=int(time.time()),
            model=job.name,
            fingerprint=api.served.fingerprint,
            usage=ask.usage,
            token=api.served.token if ask.logprobs else None,
        )
        api.check_room(job.caller)  # others may have come since he was let in; from here on he counts
        async with Answering(cluster, ask, job.prompts, job.form, api.metrics, job.caller) as answering:
            api.live.add(answering)
            try:
                write = send_stream if ask.stream else send_whole

                def counts() -> dict[str, Any]:
                    return answers.usage_of(answering.completions, ask.n)

                await write(send, answering, shape, counts, {"x-request-id": f"req_{number}"})
            finally:
                api.live.discard(answering)


_FRESH = {"cache-control": "no-store"}


async def _no_route(request: Request, error: Exception) -> Response:
    """Starlette's own refusals in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path:.100}"
    if error.status_code == 404:
        failure = ApiError(404, f"there is nothing at {what}", code="unknown_url")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        failure = ApiError(405, f"{what}: only {allowed} works here", code="method_not_allowed")
    else:
        failure = ApiError(error.status_code, str(error.detail))
    return JSONResponse(failure.body(), failure.status, {**dict(error.headers or {}), **_FRESH})
