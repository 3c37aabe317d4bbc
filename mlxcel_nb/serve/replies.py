"""How an `Answering` is written to its caller: at once as JSON, or as server-sent events while it comes.

The streams follow the WHATWG's HTML standard, section 9.2: `data:` lines, and lines that begin with a colon, which
readers skip, to keep a silent connection open. A failure after the first byte is an event with an `error` in it, after
which the stream ends: without a `finish_reason`, and without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

from mlxcel_nb.serve.answering import Answering, News
from mlxcel_nb.serve.answers import Shape
from mlxcel_nb.serve.failures import ApiError

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]

STATUS_S = 10.0
"""A stream's status waits this long for the engines to accept its request, so that a refusal is a status of its own."""

QUIET_S = 15.0
"""After so long without an event a comment is sent: proxies cut what is silent for a minute."""

READER_S = 120.0
"""Who takes nothing for so long of what lies ready is gone."""

DONE = b"data: [DONE]\n\n"


class ReaderGone(Exception):
    """The caller is not there any more, or has stopped reading."""


def event(data: dict[str, Any]) -> bytes:
    """One event. JSON has no line ends, so it is one line of data."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def send_json(send: Send, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    lines = {"content-type": "application/json", "content-length": str(len(raw)), "cache-control": "no-store"}
    await _send(send, _start(status, {**lines, **(headers or {})}))
    await _send(send, {"type": "http.response.body", "body": raw})


async def send_error(send: Send, error: ApiError) -> None:
    await send_json(send, error.status, error.body(), error.headers)


async def send_whole(
    send: Send, answering: Answering, shape: Shape, counts: Callable[[], dict[str, Any]], headers: dict[str, str]
) -> None:
    """Everything at once, when all of it is there."""
    while not answering.done:
        await answering.arrived()
        answering.news()
    await send_json(send, 200, shape.whole(answering.finished, counts()), headers)


async def send_stream(
    send: Send, answering: Answering, shape: Shape, counts: Callable[[], dict[str, Any]], headers: dict[str, str]
) -> None:
    """Everything as it comes.

    Raises:
        ApiError: before the status has been sent.
    """
    await answering.arrived(STATUS_S)
    body = _chunks(shape, answering.news())
    lines = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store", "x-accel-buffering": "no"}
    await _send(send, _start(200, {**lines, **headers}))
    await _more(send, body or b": the engines are at work\n\n")
    try:
        while not answering.done:
            come = await answering.arrived(QUIET_S)
            await _more(send, _chunks(shape, answering.news()) if come else b": still at work\n\n")
        # The last look may have come between an answer's text and its end.
        rest = _chunks(shape, answering.news()) + (event(shape.counts(counts())) if shape.usage else b"") + DONE
    except ApiError as error:
        rest = event(error.body())
    await _send(send, {"type": "http.response.body", "body": rest})


def _chunks(shape: Shape, news: list[News]) -> bytes:
    chunks = []
    for each in news:
        likely = each.likely  # go with the first chunk that there is
        if each.text:
            chunks.append(shape.text(each.index, each.text, likely))
            likely = ()
        for number, call in enumerate(each.calls, each.first_call):
            chunks.append(shape.call(each.index, number, call, likely))
            likely = ()
        if each.finished:
            chunks.append(shape.last(each.finished, likely))
    return b"".join(map(event, chunks))


def _start(status: int, headers: dict[str, str]) -> Message:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


async def _more(send: Send, body: bytes) -> None:
    if body:
        await _send(send, {"type": "http.response.body", "body": body, "more_body": True})


async def _send(send: Send, message: Message) -> None:
    """Hand a message on as soon as those before it have been taken."""
    try:
        async with asyncio.timeout(READER_S):
            await send(message)
    except (TimeoutError, OSError):
        raise ReaderGone from None


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` as long as the caller is there; when he goes, it is cancelled at once.

    Raises:
        ReaderGone: he went. Whatever `work` raises.
    """
    working, watching = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone = not working.done()
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if gone:
        raise ReaderGone
    working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
