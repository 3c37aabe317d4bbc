"""Many requests at once, their answers in the order of the prompts.

`run` belongs to the thread that calls it and starts none. So many requests are under way that the engine has its
batches full, and no more: the leader's queue is bounded, and others may be waiting in it.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.client.arguments import check_messages, check_n, check_params, check_prompts
from mlxcel_nb.client.report import BatchProgress, Completion
from mlxcel_nb.client.stream import CHECK_S, Stream
from mlxcel_nb.errors import Busy, Cancelled, MlxcelError, RequestError
from mlxcel_nb.models.params import SamplingParams

MOST = 64
"""Requests under way for each replica of the model: as many as an engine runs at once."""

POLL_S = 0.1
"""An interrupt, and a `stopped` that became true, are felt within this time."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Between two attempts to get into a queue that is full; doubled each time."""

BUSY_S = 120.0
"""A leader that is busy with others' requests, and takes none of ours for so long, is an error."""

Conversation = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of a batch."""

    params: SamplingParams
    prompt: str | Sequence[int] | None = field(default=None, repr=False)
    messages: Conversation | None = field(default=None, repr=False)


def asks(
    prompts: Sequence[str | Sequence[int]] | None,
    params: SamplingParams | Sequence[SamplingParams] | None,
    *,
    conversations: Sequence[Conversation] | None = None,
    n: int = 1,
) -> list[Ask]:
    """What to ask: `n` answers for each prompt, or for each conversation, side by side.

    Args:
        params: for all, or one for each prompt.

    Raises:
        RequestError: both kinds of prompts or none, an `n` that cannot be, parameters that are too few or too many, or
            what is no prompt, no conversation or no set of parameters.
    """
    if (prompts is None) == (conversations is None):
        raise RequestError("give prompts or conversations, one of the two")
    check_n(n)
    if prompts is not None:
        check_prompts(prompts)
    for messages in conversations or ():
        check_messages(messages)
    count = len(prompts if prompts is not None else conversations or ())
    given = SamplingParams() if params is None else params
    for one in given if isinstance(given, list | tuple) else [given]:
        check_params(one)
    each = [given] * count if isinstance(given, SamplingParams) else given
    if len(each) != count:
        raise RequestError(f"{len(each)} sets of parameters for {count} prompts", advice="Give one, or one for each.")
    if conversations is not None:
        wanted = [Ask(messages=messages, params=p) for messages, p in zip(conversations, each, strict=True)]
    else:
        assert prompts is not None
        wanted = [Ask(prompt=prompt, params=p) for prompt, p in zip(prompts, each, strict=True)]
    return [
        Ask(prompt=ask.prompt, messages=ask.messages, params=ask.params.variant(i)) for ask in wanted for i in range(n)
    ]


def run(
    wanted: Sequence[Ask],
    begin: Callable[[Ask], Stream],
    *,
    most: int = MOST,
    n: int = 1,
    on_progress: Callable[[BatchProgress], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Completion]:
    """Ask all of `wanted`, at most `most` at a time.

    Args:
        begin: starts a request.
        n: answers that are wanted of each prompt, to count prompts by.
        on_progress: called on this thread after every piece of text.
        stopped: true when nobody waits any more; all requests are cancelled then.

    Returns:
        The answers, in the order of `wanted`.

    Raises:
        MlxcelError: the first request that failed, with the number of its prompt; the others are cancelled. So they are
            by whatever else is raised here, an interrupt for one.
    """
    batch = _Batch(wanted, begin, most, n)
    try:
        while not batch.done:
            if stopped():
                raise Cancelled("nobody waits for these requests any more")
            batch.start()
            if batch.step() and on_progress is not None:
                on_progress(batch.progress)
    except BaseException:
        batch.cancel()
        raise
    return batch.answers


class _Batch:
    def __init__(self, wanted: Sequence[Ask], begin: Callable[[Ask], Stream], most: int, n: int) -> None:
        self._wanted = wanted
        self._begin = begin
        self._most = most
        self._n = n
        self._waiting = deque(range(len(wanted)))
        self._under_way: dict[int, Stream] = {}
        self._answers: dict[int, Completion] = {}
        self._tokens = 0
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._pause = 0.0
        self._again = 0.0
        self._moved = self._looked = self._began = time.monotonic()

    @property
    def done(self) -> bool:
        return len(self._answers) == len(self._wanted)

    @property
    def answers(self) -> list[Completion]:
        return [self._answers[index] for index in sorted(self._answers)]

    @property
    def progress(self) -> BatchProgress:
        seconds = time.monotonic() - self._began
        return BatchProgress(done=len(self._answers), total=len(self._wanted), tokens=self._tokens, seconds=seconds)

    def start(self) -> None:
        """Begin as many as there is room for; none while a leader that was busy is left in peace."""
        while self._waiting and len(self._under_way) < self._most and time.monotonic() >= self._again:
            index = self._waiting.popleft()
            try:
                self._under_way[index] = stream = self._begin(self._wanted[index])
            except MlxcelError as error:
                raise self._named(error, index) from None
            stream.watch(lambda index=index: self._came.put(index))  # type: ignore[misc]

    def step(self) -> bool:
        """Wait for news and take it; whether there was any."""
        now = time.monotonic()
        if now - self._looked > CHECK_S:  # at those that say nothing: does their leader make progress?
            self._looked = now
            taken = [self._take(index) for index in list(self._under_way)]
            return any(taken)
        try:
            return self._take(self._came.get(timeout=POLL_S))
        except queue.Empty:
            return False

    def cancel(self) -> None:
        """End all that are under way."""
        for stream in self._under_way.values():
            stream.cancel()

    def _take(self, index: int) -> bool:
        stream = self._under_way.get(index)
        if stream is None:
            return False
        before = len(stream.token_ids)
        try:
            while stream.next(0) is not None:
                pass
        except Busy as error:
            if stream.token_ids:
                raise self._named(error, index) from None
            self._put_back(index, error)
            return False
        except MlxcelError as error:
            raise self._named(error, index) from None
        made = len(stream.token_ids) - before
        self._tokens += made
        if stream.completion is not None:
            self._answers[index] = stream.completion
            del self._under_way[index]
        if not made and stream.completion is None:
            return False
        self._moved, self._pause = time.monotonic(), 0.0
        return True

    def _put_back(self, index: int, error: Busy) -> None:
        """It goes first when the queue has room again."""
        del self._under_way[index]
        self._waiting.appendleft(index)
        now = time.monotonic()
        if not self._under_way and now - self._moved > BUSY_S:
            raise Busy(f"{error.cause}, and none of these was taken in {BUSY_S:g} s", node=error.node) from None
        if now >= self._again:  # several are sent away at once: that is one refusal
            self._pause = min(max(2 * self._pause, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._again = now + self._pause

    def _named(self, error: MlxcelError, index: int) -> MlxcelError:
        """The error with the number of its prompt; the text of it is nobody's but the user's."""
        count = len(self._wanted) // self._n
        if count == 1:
            return error
        told = type(error)(
            f"prompt {index // self._n + 1} of {count}: {error.cause}", node=error.node, advice=error.advice
        )
        told.table = error.table
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        return told
