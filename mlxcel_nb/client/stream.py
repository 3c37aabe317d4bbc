"""An answer as it arrives.

A `Stream` is filled on the router's loop and read by one thread or one task of the user's. It ends exactly once,
whatever happens to the nodes: with the leader's end frame, or with the loss of the leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

from mlxcel_nb.client import answer
from mlxcel_nb.client.report import Completion, Delta, Likelihood
from mlxcel_nb.errors import MlxcelError, StepTimeout, WireError

POLL_S = 0.1
"""How often a reader looks up between two messages, so that an interrupt is prompt."""

CHECK_S = 5.0
"""Silence after which the leader is asked whether it still makes progress."""


_MORE_FOLLOWS = frozenset({"prefill", "delta"})


class Inbox:
    """Where a request's messages wait for their reader. Filled on the router's loop.

    It knows the last message when it sees it and lets go of its place then, whether anybody reads or not.

    Args:
        release: gives the place among the router's inboxes up; called once, from any thread.
    """

    def __init__(self, leader: str, release: Callable[[], None]) -> None:
        self.leader = leader
        self.ended = False
        self._release = release
        self._wake: Callable[[], None] | None = None
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def put(self, node_id: str, message: dict[str, Any]) -> None:
        """Take a message of this request; a lost node other than the leader is the leader's to report."""
        kind = message.get("type")
        if kind == "lost" and node_id != self.leader:
            return
        self._messages.put(message)
        if self._wake is not None:
            self._wake()
        if kind not in _MORE_FOLLOWS:
            self.close()

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called after each message from now on, on the router's loop, for readers that do not block."""
        self._wake = wake

    def get(self, timeout: float) -> dict[str, Any]:
        """The next message; `queue.Empty` when none came within `timeout` seconds."""
        return self._messages.get(timeout=timeout)

    def close(self) -> None:
        """Nothing more is expected."""
        if not self.ended:
            self.ended = True
            self._release()


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for `event`; False when it has not come within `seconds`.

    Until Python 3.12 `wait_for` would lose a cancellation that comes together with the event.
    """
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _abandon(inbox: Inbox, cancel: Callable[[], None]) -> None:
    """Nobody holds the stream any more: its request must not go on for nobody."""
    if not inbox.ended:
        cancel()


class Stream:
    """One request's answer.

    Iterate for `Delta`s, or call `result()`. An error ends the iteration by being raised; the text so far stays
    in `text`. A stream that is left before its end is cancelled: by `close`, at the end of a `with`, or when nobody
    holds it any more.

    Args:
        cancel: tells the leader to stop.
        progress: the leader's progress counter; raises when it cannot be had.
        explain: makes an error say more, e.g. which signal ended a process.
        ended: takes the completion, once, on the reader's thread.
        stall_s: without progress for this long, the stream fails.
        replica: of several, the one that answers.

    Attributes:
        prefill: while a long prompt is read: how many of its tokens have been, and of how many.
    """

    def __init__(
        self,
        inbox: Inbox,
        *,
        cancel: Callable[[], None],
        progress: Callable[[], int],
        explain: Callable[[MlxcelError], MlxcelError],
        ended: Callable[[Completion], None],
        stall_s: float,
        replica: int | None = None,
    ) -> None:
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[Likelihood, ...] = ()
        self.completion: Completion | None = None
        self.error: MlxcelError | None = None
        self.prefill: tuple[int, int] | None = None
        self._inbox = inbox
        self._leader = inbox.leader
        self._cancel = cancel
        self._progress = progress
        self._explain = explain
        self._ended = ended
        self._stall_s = stall_s
        self.replica = replica
        self._seq = 0
        self._counter = -1
        self._moved = self._heard = time.monotonic()
        weakref.finalize(self, _abandon, inbox, cancel).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs; what has arrived can still be read."""
        self.cancel()

    @property
    def done(self) -> bool:
        return self.completion is not None

    def cancel(self) -> None:
        """Ask every rank to stop, from any thread; the stream then ends with finish_reason "cancelled"."""
        if not self.done:
            self._cancel()

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on the router's loop, whenever something may be there for `next(0)`; and once now."""
        self._inbox.watch(wake)
        wake()

    def next(self, timeout: float) -> Delta | None:
        """The next delta, or None when nothing came within `timeout` seconds or the stream is done.

        Raises:
            MlxcelError: the request failed.
        """
        deadline = time.monotonic() + timeout
        while not self.done:
            try:
                message = self._inbox.get(max(0.0, min(POLL_S, deadline - time.monotonic())))
            except queue.Empty:
                self._check_stall()
                if time.monotonic() >= deadline:
                    return None
                continue
            if delta := self._take(message):
                return delta
            if self.error is not None:
                raise self.error
        return None

    def __iter__(self) -> Iterator[Delta]:
        while not self.done:
            if delta := self.next(CHECK_S):
                yield delta
        if self.error is not None:
            raise self.error

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Waits without a thread, so one loop reads any number of streams."""
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop has ended
                loop.call_soon_threadsafe(arrived.set)

        self._inbox.watch(wake)
        while not self.done:
            arrived.clear()
            try:
                message = self._inbox.get(0)
            except queue.Empty:
                if not await _within(arrived, CHECK_S):
                    await asyncio.to_thread(self._check_stall)
                continue
            # Why a node is lost may take seconds to find out.
            quick = message.get("type") == "delta"
            if delta := self._take(message) if quick else await asyncio.to_thread(self._take, message):
                yield delta
        if self.error is not None:
            raise self.error

    def result(self) -> Completion:
        """Wait for the end.

        Raises:
            MlxcelError: the request failed; `text` holds what there was.
        """
        for _ in self:
            pass
        assert self.completion is not None
        return self.completion

    def _take(self, message: dict[str, Any]) -> Delta | None:
        self._heard = time.monotonic()
        try:
            frame = answer.read(message)
            if frame.seq not in (self._seq, None):
                raise WireError(f"frame {self._seq} of the answer is missing")
        except WireError as error:
            self.cancel()
            self._fail(error.at(self._leader))
            return None
        self.prefill = frame.prefill
        if frame.prefill is not None:
            return None
        self._seq += 1
        self.text += frame.text
        self.token_ids += frame.tokens
        self.logprobs += frame.logprobs
        if frame.end is not None:
            self._finish(frame.end)
        return Delta(frame.text, frame.tokens, frame.logprobs) if frame.text else None

    def _finish(self, end: answer.End) -> None:
        self.error = self._explain(end.error) if end.error else None
        self.completion = Completion(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=end.finish_reason,
            prompt_tokens=end.prompt_tokens or 0,
            cached_tokens=end.cached_tokens or 0,
            generation_tokens=len(self.token_ids) if end.generation_tokens is None else end.generation_tokens,
            timings=end.timings,
            layout=end.layout,
            stop_reason=end.stop_reason,
            replica=self.replica,
            logprobs=self.logprobs,
        )
        self._inbox.close()
        self._ended(self.completion)

    def _fail(self, error: MlxcelError) -> None:
        self._finish(answer.End(finish_reason="error", error=error))

    def _check_stall(self) -> None:
        """Silence is legal while the leader's progress counter moves."""
        now = time.monotonic()
        if now - max(self._heard, self._moved) < CHECK_S:
            return
        try:
            counter = self._progress()
        except MlxcelError as error:
            self._fail(error)
            assert self.error is not None
            raise self.error from None
        if counter != self._counter:
            self._counter, self._moved = counter, now
            return
        if now - max(self._heard, self._moved) > self._stall_s:
            self.cancel()
            self._fail(StepTimeout(f"no progress for {self._stall_s:g} s", node=self._leader))
            assert self.error is not None
            raise self.error
