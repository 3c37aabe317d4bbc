"""The answers to one request: their streams are opened, read side by side, and handed on as they come.

On the server's loop. Reading goes on at the engines' pace whatever the caller does: what he has not taken yet waits as
text, which `max_tokens` bounds, and nobody else notices him. Leaving an `Answering` cancels what still runs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mlxcel_nb.client.report import Completion
from mlxcel_nb.client.stream import Stream
from mlxcel_nb.errors import Cancelled, MlxcelError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.serve.answers import Finished, Likely
from mlxcel_nb.serve.failures import ApiError
from mlxcel_nb.serve.metrics import Meter, Metrics
from mlxcel_nb.serve.requests import Ask
from mlxcel_nb.serve.tools import Call, Form, Reader
from mlxcel_nb.util.log import get_logger, trail

if TYPE_CHECKING:
    from mlxcel_nb.client.cluster import Cluster

log = get_logger("serve.answering")


@dataclass(frozen=True, kw_only=True)
class News:
    """What came of one answer since somebody looked last.

    Args:
        calls: whole calls of tools, the first of them the `first_call`th of its answer.
        likely: the tokens of that, where their log-probabilities were asked for.
        finished: the answer is over.
    """

    index: int
    text: str = ""
    calls: tuple[Call, ...] = ()
    first_call: int = 0
    likely: Likely = ()
    finished: Finished | None = None


@dataclass
class _Part:
    """One answer on its way."""

    index: int
    reader: Reader | None
    text: str = ""
    likely: Likely = ()
    completion: Completion | None = None
    _told: int = 0
    _told_calls: int = 0
    _told_likely: int = 0
    _told_end: bool = field(default=False)

    def take(self, text: str, stream: Stream) -> None:
        self.text += self.reader.feed(text) if self.reader else text
        self._note(stream)

    def end(self, completion: Completion, stream: Stream) -> None:
        if self.reader:
            self.text += self.reader.flush()
        self._note(stream)
        self.completion = completion

    def _note(self, stream: Stream) -> None:
        """Tokens that came since; of some there was no text yet when they did."""
        if not stream.logprobs:
            return
        seen = len(self.likely)
        self.likely += tuple(zip(stream.token_ids[seen:], stream.logprobs[seen:], strict=False))

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(self.reader.calls) if self.reader else ()

    def finished(self) -> Finished | None:
        if self.completion is None:
            return None
        reason = self.completion.finish_reason
        reason = "tool_calls" if self.calls and reason == "stop" else reason
        return Finished(index=self.index, text=self.text, calls=self.calls, reason=reason, likely=self.likely)

    def news(self) -> News | None:
        """What nobody has been told yet."""
        text, calls, first = self.text[self._told :], self.calls[self._told_calls :], self._told_calls
        finished = None if self._told_end else self.finished()
        if not (text or calls or finished):
            return None
        likely = self.likely[self._told_likely :]
        self._told, self._told_calls, self._told_end = len(self.text), len(self.calls), finished is not None
        self._told_likely = len(self.likely)
        return News(index=self.index, text=text, calls=calls, first_call=first, likely=likely, finished=finished)


class Answering:
    """The answers to `ask`, under way from `async with` on.

    Args:
        prompts: token ids; each gets `ask.n` answers.
        form: how calls of tools are written in them, None to leave text as it is.
        caller: who asks: callers are served in turn.
    """

    def __init__(
        self, cluster: Cluster, ask: Ask, prompts: list[list[int]], form: Form | None, metrics: Metrics, caller: str
    ) -> None:
        self.caller = caller
        self._cluster = cluster
        self._ask = ask
        self._wanted = [(ids, ask.params.variant(i)) for ids in prompts for i in range(ask.n)]
        self._parts = [_Part(i, Reader(form) if form else None) for i in range(len(self._wanted))]
        self._metrics = metrics
        self._arrived = asyncio.Event()
        self._failure: ApiError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._meters: list[Meter] = []

    async def __aenter__(self) -> Self:
        """Begin. All of it counts as waiting from here on, without a turn of the loop in between."""
        self._meters = [self._metrics.begin(self.caller, len(ids)) for ids, _ in self._wanted]
        self._tasks = [
            asyncio.create_task(self._answer(part, ids, params, meter))
            for part, (ids, params), meter in zip(self._parts, self._wanted, self._meters, strict=True)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for meter in self._meters:  # of tasks that were cancelled before they began
            meter.end("cancelled")

    async def arrived(self, timeout: float | None = None) -> bool:
        """Wait until there is something to tell; False when there was nothing within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    def news(self) -> list[News]:
        """What has come since the last look.

        Raises:
            ApiError: an answer failed, and the request with it.
        """
        self._arrived.clear()
        told = [news for part in self._parts if (news := part.news()) is not None]
        if self._failure is not None and not self.done:
            if not any(news.text or news.calls for news in told):
                raise self._failure
            self._arrived.set()  # what there is of the answer is told first
        return told

    @property
    def done(self) -> bool:
        return all(part.completion is not None for part in self._parts)

    @property
    def finished(self) -> list[Finished]:
        return [finished for part in self._parts if (finished := part.finished()) is not None]

    @property
    def completions(self) -> list[Completion]:
        return [part.completion for part in self._parts if part.completion is not None]

    def fail(self, failure: ApiError) -> None:
        """End the request with `failure`; the first one counts."""
        self._failure = self._failure or failure
        self._arrived.set()

    async def _answer(self, part: _Part, ids: list[int], params: SamplingParams, meter: Meter) -> None:
        try:
            stream = await asyncio.to_thread(self._cluster.stream, ids, params, caller=self.caller)
            await self._read(part, stream, meter)
        except MlxcelError as error:
            meter.end("cancelled" if isinstance(error, Cancelled) else "error")
            self.fail(self._ask.failure(error))
        except Exception as error:  # noqa: BLE001 - whatever it was, whoever waits must hear of it
            log.error("an answer failed: %s", trail(error))
            self.fail(ApiError(500, "the server made a mistake"))
        finally:
            meter.end("cancelled" if self._failure is None else "error")

    async def _read(self, part: _Part, stream: Stream, meter: Meter) -> None:
        try:
            async for delta in stream:
                meter.piece(len(delta.tokens))
                part.take(delta.text, stream)
                self._arrived.set()
            assert stream.completion is not None
            if stream.completion.finish_reason == "cancelled":
                raise Cancelled("the request was stopped", advice="The model was unloaded, or its cluster is stopping.")
            part.end(stream.completion, stream)
            self._arrived.set()
            meter.end(stream.completion.finish_reason, stream.completion)
        finally:
            stream.cancel()  # does nothing to one that has ended
