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
from dataclasses import dataclass, replace
from typing import Any, Self

from mlxcel_nb.client import answer
from mlxcel_nb.client.report import Completion, Delta, Likelihood, Timings
from mlxcel_nb.errors import EngineLost, MlxcelError, PeerLost, StepTimeout, WireError

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


@dataclass(frozen=True)
class Line:
    """A request that a leader has taken, and what there is to reach it by.

    Args:
        inbox: where its messages come.
        cancel: tells the leader to stop.
        progress: the leader's progress counter; raises when it cannot be had.
        explain: makes an error say more, e.g. which signal ended a process.
        ended: takes the completion, once, on the reader's thread.
        replica: of several, the one that answers.
    """

    inbox: Inbox
    cancel: Callable[[], None]
    progress: Callable[[], int]
    explain: Callable[[MlxcelError], MlxcelError]
    ended: Callable[[Completion], None]
    replica: int | None = None


class Stream:
    """One request's answer.

    Iterate for `Delta`s, or call `result()`. An error ends the iteration by being raised; the text so far stays
    in `text`. A stream that is left before its end is cancelled: by `close`, at the end of a `with`, or when nobody
    holds it any more.

    Args:
        line: to whoever answers.
        stall_s: without progress for this long, the stream fails.
        again: takes the tokens that have come, and has somebody else go on after them when whoever answered is lost.

    Attributes:
        prefill: while a long prompt is read: how many of its tokens have been, and of how many.
        moves: how often somebody else went on.
    """

    def __init__(self, line: Line, *, stall_s: float, again: Callable[[tuple[int, ...]], Line] | None = None) -> None:
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[Likelihood, ...] = ()
        self.completion: Completion | None = None
        self.error: MlxcelError | None = None
        self.prefill: tuple[int, int] | None = None
        self.moves = 0
        self._again = again
        self._stall_s = stall_s
        self._cancelled = False
        self._wake: Callable[[], None] | None = None
        self._began = time.monotonic()
        self._first: float | None = None
        self._hold(line)

    def _hold(self, line: Line) -> None:
        """Listen to `line` from now on."""
        self._line = line
        self._seq = 0
        self._counter = -1
        self._moved = self._heard = time.monotonic()
        weakref.finalize(self, _abandon, line.inbox, line.cancel).atexit = False

    @property
    def replica(self) -> int | None:
        """Of several, the one that answers."""
        return self._line.replica

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
            self._cancelled = True
            self._line.cancel()

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on the router's loop, whenever something may be there for `next(0)`; and once now."""
        self._wake = wake
        self._line.inbox.watch(wake)
        wake()

    def next(self, timeout: float) -> Delta | None:
        """The next delta, or None when nothing came within `timeout` seconds or the stream is done.

        Raises:
            MlxcelError: the request failed.
        """
        deadline = time.monotonic() + timeout
        while not self.done:
            try:
                message = self._line.inbox.get(max(0.0, min(POLL_S, deadline - time.monotonic())))
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

        self.watch(wake)
        while not self.done:
            arrived.clear()
            try:
                message = self._line.inbox.get(0)
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
            self._fail(error.at(self._line.inbox.leader))
            return None
        self.prefill = frame.prefill
        if frame.prefill is not None:
            return None
        if frame.end is not None and frame.end.error is not None and self._moves_on(frame.end.error):
            return None  # the same text comes from there
        self._seq += 1
        if self._first is None and frame.tokens:
            self._first = self._heard
        self.text += frame.text
        self.token_ids += frame.tokens
        self.logprobs += frame.logprobs
        if frame.end is not None:
            self._finish(frame.end)
        return Delta(frame.text, frame.tokens, frame.logprobs) if frame.text else None

    def _moves_on(self, error: MlxcelError) -> bool:
        """Whether somebody else goes on, now that whoever answered is lost."""
        if self._again is None or self._cancelled or not isinstance(error, PeerLost | EngineLost):
            return False
        self._line.explain(error)  # which notes the loss
        try:
            line = self._again(self.token_ids)
        except MlxcelError:  # nobody is left: the loss is what there is to say
            return False
        self._line.inbox.close()
        self._hold(line)
        self.moves += 1
        if self._wake is not None:
            self.watch(self._wake)
        if self._cancelled:  # meanwhile
            line.cancel()
        return True

    def _timings(self, timings: Timings) -> Timings:
        """As the user has seen them, where the leader saw only the latest part."""
        if not self.moves:
            return timings
        now = time.monotonic()
        first = timings.ttft_s if self._first is None else self._first - self._began
        return replace(timings, ttft_s=first, total_s=now - self._began)

    def _finish(self, end: answer.End) -> None:
        line = self._line
        self.error = line.explain(end.error) if end.error else None
        self.completion = Completion(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=end.finish_reason,
            prompt_tokens=end.prompt_tokens or 0,
            cached_tokens=end.cached_tokens or 0,
            generation_tokens=len(self.token_ids) if end.generation_tokens is None else end.generation_tokens,
            timings=self._timings(end.timings),
            layout=end.layout,
            stop_reason=end.stop_reason,
            replica=self.replica,
            logprobs=self.logprobs,
            moves=self.moves,
            handover=end.handover,
        )
        line.inbox.close()
        line.ended(self.completion)

    def _fail(self, error: MlxcelError) -> None:
        self._finish(answer.End(finish_reason="error", error=error))

    def _check_stall(self) -> None:
        """Silence is legal while the leader's progress counter moves."""
        now = time.monotonic()
        if now - max(self._heard, self._moved) < CHECK_S:
            return
        try:
            counter = self._line.progress()
        except MlxcelError as error:
            if self._moves_on(error):
                return
            self._fail(error)
            assert self.error is not None
            raise self.error from None
        if counter != self._counter:
            self._counter, self._moved = counter, now
            return
        if now - max(self._heard, self._moved) > self._stall_s:
            self.cancel()
            self._fail(StepTimeout(f"no progress for {self._stall_s:g} s", node=self._line.inbox.leader))
            assert self.error is not None
            raise self.error
