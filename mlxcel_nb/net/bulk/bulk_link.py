"""A link for what is large and comes in its own time: caches of sequences, on their way from one instance to another.

A thread of its own drives each link, so that neither those who compute nor the loop wait for it. Whoever has something
to send hands over frames that are not made yet; they are made, sealed and sent one by one, as the peer's credit allows,
so what lies in memory is what the peer has not taken.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mlxcel_nb import errors
from mlxcel_nb.errors import MlxcelError, StepTimeout, WireError
from mlxcel_nb.net.hot.inbox import Tensor
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.hot.line import Line
from mlxcel_nb.net.hot.outgoing import Outgoing
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.hot.waiting import Patience, wait
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.util.log import get_logger, trail
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.credits import ReceiveCredits
from mlxcel_nb.wire.frames import Frame, Kind

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = get_logger("net.bulk")

CHANNEL = 1
"""Both directions use the dialling end's first channel."""

IDLE_S = 60.0
"""A wait for nothing in particular is begun again after this."""


class _Wake(Exception):
    """There is something to send, or the link is to end."""


class BulkLink(Line):
    """Owns a `Link` from here on, and from `start` on a thread that drives it. `send`, `post` and `stop` are for any
    thread; the handlers are called on the link's own.

    Args:
        on_frame: takes the payload of each kv frame, valid for the call; what it returns is sent back. A `WireError` it
            raises ends the link.
        on_message: takes each control message.
        on_end: told once why the link has ended, however it did.
        stall_s: a peer that takes nothing for so long, while there is something to send, is given up.
    """

    def __init__(
        self,
        link: Link,
        *,
        on_frame: Callable[[BulkLink, memoryview], bytes | None],
        on_message: Callable[[BulkLink, dict[str, Any]], None],
        on_end: Callable[[BulkLink, MlxcelError], None],
        stall_s: float,
    ) -> None:
        super().__init__(link)
        self._on_frame = on_frame
        self._on_message = on_message
        self._on_end = on_end
        self._stall_s = stall_s
        self._lets_send = ReceiveCredits()
        self._queue: queue.SimpleQueue[Outgoing | Callable[[], Outgoing]] = queue.SimpleQueue()
        self._under_way: Outgoing | None = None
        self._wake = Interrupt()
        self._stopping: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"bulk-{self.node}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, frames: Iterable[Sequence[ReadableBuffer]]) -> None:
        """Send kv frames, each a list of parts, in their order and after all that was given before.

        Args:
            frames: taken one by one, on the link's thread, when there is room for the next.
        """
        self._put(lambda: Outgoing(Kind.KV, CHANNEL, frames))

    def post(self, message: dict[str, Any]) -> None:
        """Send a control message after all that was given before."""
        packed = messages.pack(message)
        self._put(lambda: Outgoing(Kind.CONTROL, 0, [[packed]]))

    def stop(self, reason: str = "") -> None:
        """End the link, whatever is under way; the peer is told `reason`. Does not wait."""
        self._stopping = self._stopping if self._stopping is not None else reason
        self._wake.set(_Wake())

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, after `stop`."""
        self._thread.join(timeout)

    def _put(self, made: Callable[[], Outgoing]) -> None:
        self._queue.put(made)
        self._wake.set(_Wake())

    # -- the link's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        error: MlxcelError = errors.Cancelled("this side has closed the link", node=self.node)
        try:
            while self._stopping is None:
                self._turn()
        except Exception as caught:  # noqa: BLE001  # whatever it was, the link is over
            if not isinstance(caught, MlxcelError):
                log.error("the link to %s ended: %s", self.node, trail(caught))
            error = errors.wrap(caught, self.node)
        finally:
            self.close(self._stopping or "")
            self._on_end(self, error)
            self._wake.close()

    def _turn(self) -> None:
        """Send what goes, take what has come, else wait for either."""
        self.begin()
        out = self._under_way = self._under_way or self._next()
        moves = self.moves
        gone = self.pump_out(out)
        if gone:
            self._under_way = None
        if self.absorb() or (gone and out is not None) or self.moves > moves:
            return
        limit = IDLE_S if out is None else self._stall_s
        try:
            wait([self], self._wake, Patience(time.monotonic() + limit), f"{self.node} to take keys and values")
        except _Wake:
            self._wake.clear()
        except StepTimeout:
            if out is not None:
                raise

    def _next(self) -> Outgoing | None:
        try:
            made = self._queue.get_nowait()
        except queue.Empty:
            return None
        return made() if callable(made) else made

    def _dispatch(self, frame: Frame, tag: Tag | None = None, name: str = "") -> Tensor | None:
        try:
            if frame.kind is Kind.TENSOR:
                raise WireError("a tensor frame on a link for caches")
            if frame.kind is Kind.CONTROL:
                self._on_message(self, messages.unpack(frame.payload))
                return None
            if frame.kind is not Kind.KV:
                return super()._dispatch(frame, tag, name)
            self._lets_send.received(frame.channel)
            answer = self._on_frame(self, frame.payload)
            if count := self._lets_send.taken(frame.channel):
                self._grant(frame.channel, count)
        except WireError as error:
            self._refuse(error)
        if answer:
            self.send([[answer]])
        return None
