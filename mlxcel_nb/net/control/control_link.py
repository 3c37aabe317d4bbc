"""A link driven by an asyncio loop: control messages, token streams, pings, and the peer's life.

Everything here belongs to the loop the `ControlLink` was made on; other threads hop there first. The socket is read
and written by the loop's own readiness callbacks, so a token costs no task switch. The peer is a member: it is obeyed
where a handler says so, and every queue it could fill is bounded.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

from mlxcel_nb.errors import MlxcelError, PeerLost, WireError
from mlxcel_nb.net.control.liveness import Health, Liveness
from mlxcel_nb.net.control.pings import Pings
from mlxcel_nb.net.control.sending import Sending
from mlxcel_nb.net.links.link import BENT, Link
from mlxcel_nb.util import times
from mlxcel_nb.util.log import get_logger, trail
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.credits import COUNTED, ReceiveCredits, SendCredits
from mlxcel_nb.wire.frames import MAX_UNANSWERED_PINGS, Frame, Kind, close_reason, credit_count

log = get_logger("net.link")

READ_BYTES = 64 * 1024

QUEUE_BYTES = 12 << 20
"""Frames that wait for the socket: room for eight pongs of the largest size and a long prompt behind them."""

LOOK = "Look at what runs there, and at its log."
SILENT = "Look at what runs there: a stopped or overloaded process is silent as well."
"""What to do about a peer that is gone, and about one that says nothing."""

BACKLOG_BYTES = 4 << 20
"""Stream messages that wait for the peer's credit."""


class ControlLink:
    """Owns a `Link` from here on.

    Args:
        on_state: called with "suspect", "alive" (again), "dead" or "closed" (by the peer), and the reason. Not called
            for this side's own `close`.
        on_message: called with each control message (kind 3) after the first.
        on_stream: called with each stream message (kind 6).
        on_frame: takes kinds 3 to 7 as they came, none of them looked into; the two above are not called then.
        measure: ping once at the start, so that `rtt_s` is known before the link was ever idle.
        quiet: leave it to the owner to say why the link was given up; else it is logged.

    A frame that nobody takes is a protocol error. A handler that raises `WireError` ends the link with that reason.
    """

    def __init__(
        self,
        link: Link,
        *,
        on_state: Callable[[ControlLink, str, str], None],
        on_message: Callable[[ControlLink, dict[str, Any]], None] | None = None,
        on_stream: Callable[[ControlLink, dict[str, Any]], None] | None = None,
        on_frame: Callable[[ControlLink, Frame], None] | None = None,
        measure: bool = False,
        quiet: bool = False,
    ) -> None:
        self.link = link
        self.peer = link.peer
        self.state = "alive"
        self.reason = ""
        self.mend: str | None = None
        """What to do about `reason`, where more is known than that the peer is gone."""
        self.cut = False
        """Whether the connection was reset or ended without a goodbye: the peer itself may still be there."""
        self.received_bytes = 0
        self._quiet = quiet
        self._on_message = on_message
        self._on_stream = on_stream
        self._on_state = on_state
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._sock = link.sock
        self._fd = link.sock.fileno()
        self._out = Sending(link.sock, link.sealer)
        self._may_send = SendCredits()
        self._lets_send = ReceiveCredits()
        self._stream_channel = 1 if link.dialled else 2
        self._backlog: collections.deque[bytes] = collections.deque()
        self._backlog_bytes = 0
        self._drained: list[asyncio.Future[None]] = []
        self._pings = Pings(link.peer.node_id)
        self._life = Liveness(self._loop.time())
        self._timer = self._loop.call_at(self._life.due, self._tick)
        link.driver = self
        self._loop.add_reader(self._fd, self._readable)
        self._loop.call_soon(self._arrived)
        if measure:
            self._send_ping()

    # -- what the owner calls ---------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self.state in ("alive", "suspect")

    def send(self, message: dict[str, Any]) -> None:
        """Send a control message; on a link that has ended it goes nowhere, as it would have on the wire."""
        if self.open:
            self.send_packed(messages.pack(message))

    def send_packed(self, data: bytes) -> None:
        """`send`, for a message that `messages.pack` has packed on another thread."""
        if self.open:
            self._write(Kind.CONTROL, 0, data)

    def send_stream(self, message: dict[str, Any]) -> None:
        """Send a stream message as soon as the peer's credit allows. A peer that never reads is given up."""
        if not self.open:
            return
        data = messages.pack(message)
        if not self._backlog and self._may_send.spend(self._stream_channel):
            self._write(Kind.STREAM, self._stream_channel, data)
            return
        self._backlog.append(data)
        self._backlog_bytes += len(data)
        if self._backlog_bytes > BACKLOG_BYTES:
            self.give_up("does not keep up with its stream")

    async def drain(self) -> None:
        """Wait until all that was sent is with the kernel.

        Raises:
            PeerLost: the link ended before.
        """
        if self.open and (self._out.waiting or self._backlog):
            done = self._loop.create_future()
            self._drained.append(done)
            await done
        if not self.open:
            raise PeerLost(self.reason, node=self.peer.node_id)

    async def ping(self, filler: bytes = b"", *, within_s: float = times.DEAD_S) -> float:
        """Round-trip time in seconds of one ping with `filler` behind it.

        Raises:
            PeerLost: the link ended, or no pong came within `within_s`.
            WireError: the pong is not what was sent, or too many are missing already.
        """
        if not self.open:
            raise self._gone()
        if self._pings.full:
            raise WireError(f"{MAX_UNANSWERED_PINGS} pings are unanswered already", node=self.peer.node_id)
        answer: asyncio.Future[float] = self._loop.create_future()
        self._send_ping(filler, answer)
        try:
            async with asyncio.timeout(within_s):  # wait_for would lose a cancel that comes together with the pong
                return await answer
        except TimeoutError:
            raise PeerLost(f"no pong within {within_s:g} s", node=self.peer.node_id, advice=SILENT) from None

    def nudge(self) -> None:
        """Ask for a sign of life: the peer answers a ping at once, whatever else it is busy with."""
        if self.open and not self._pings.full:
            self._send_ping()

    @property
    def heard_at(self) -> float:
        """When the last sign of life came, on the loop's clock."""
        return self._life.heard_at

    @property
    def rtt_s(self) -> float | None:
        """Least of recent round trips, None before the first."""
        return self._pings.least_s

    def info(self) -> dict[str, Any]:
        """The link as plain data, for status."""
        return {
            "node_id": self.peer.node_id,
            "role": self.peer.role,
            "address": self.peer.where,
            "cipher": self.link.suite_name,
            "transport": self.link.transport,
            "path": self.link.path,
            "why": self.link.why,
            "shape": self.link.shape.words if self.link.shape else "",
            "state": self.state,
            "reason": self.reason,
            "rtt_s": self.rtt_s,
            "sent_bytes": self._out.sent_bytes,
            "received_bytes": self.received_bytes,
            "age_s": time.monotonic() - self.link.since,
            "versions": self.peer.versions,
        }

    def close(self, reason: str = "") -> None:
        """Say goodbye and close, at once."""
        if self.open:
            self.state, self.reason = "closed", reason
            self._release(goodbye=reason)

    async def probe(self) -> bool:
        """Whether the peer answers a ping within `times.PROBE_S`."""
        try:
            await self.ping(within_s=times.PROBE_S)
        except MlxcelError:
            return False
        return True

    def give_up(self, reason: str) -> None:
        """End the link because of what the peer did or left undone, telling it and `on_state`."""
        if self.open:
            log.log(
                logging.DEBUG if self._quiet else logging.WARNING, "link to %s ended: %s", self.peer.node_id, reason
            )
            self._end("dead", reason, goodbye=reason)

    # -- writing ----------------------------------------------------------------------------------

    def _write(self, kind: Kind, channel: int, *parts: bytes | memoryview) -> None:
        waited = self._out.waiting
        self._out.put(kind, channel, *parts)
        if self._out.waiting and not waited:
            self._loop.add_writer(self._fd, self._writable)
        if self._out.queued_bytes > QUEUE_BYTES:
            self.give_up("does not read what it is sent")

    def _writable(self) -> None:
        self._out.flush()
        if not self._out.waiting:
            self._loop.remove_writer(self._fd)
            self._settle()

    def _settle(self) -> None:
        """Wake those who wait for everything to be sent."""
        if not self.open or not (self._out.waiting or self._backlog):
            for done in self._drained:
                if not done.done():
                    done.set_result(None)
            self._drained.clear()

    def _flush_backlog(self) -> None:
        while self._backlog and self.open and self._may_send.spend(self._stream_channel):
            data = self._backlog.popleft()
            self._backlog_bytes -= len(data)
            self._write(Kind.STREAM, self._stream_channel, data)
        self._settle()

    # -- reading ----------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            count = self._sock.recv_into(self.link.reader.get_buffer(READ_BYTES))
        except BlockingIOError:
            return
        except OSError as error:
            self.cut = True
            self._end("dead", f"connection lost ({error.strerror})")
            return
        if not count:
            self.cut = True
            self._end("dead", "its connection ended without a goodbye")
            return
        self.received_bytes += count
        self.link.reader.received(count)
        self._arrived()

    def _arrived(self) -> None:
        """Deal with every whole frame that has arrived."""
        reader, took = self.link.reader, False
        try:
            while self.open and (frame := reader.next_frame()) is not None:
                took = True
                self._take(frame)
        except WireError as error:
            self.mend = error.advice or BENT
            self.give_up(error.cause)
        if self.open:
            self._life.heard(self._loop.time(), within_frame=bool(reader.bytes_pending), frames=took)
            if self.state == "suspect":
                self.state, self.reason = "alive", ""
                self._on_state(self, "alive", "heard again")

    def _take(self, frame: Frame) -> None:
        if frame.kind in COUNTED:
            self._lets_send.received(frame.channel)
        match frame.kind:
            case Kind.PING:
                self._answer(frame)
            case Kind.PONG:
                self._pings.pong(self._loop.time(), frame.payload)
            case Kind.CLOSE:
                self._end("closed", close_reason(frame.payload) or "closed by the peer", goodbye="")
            case _ if self._on_frame is not None:
                self._on_frame(self, frame)
            case Kind.CONTROL if self._on_message is not None:
                self._handle(self._on_message, messages.unpack(frame.payload))
            case Kind.STREAM if self._on_stream is not None:
                self._handle(self._on_stream, messages.unpack(frame.payload))
            case Kind.CREDIT:
                self._may_send.grant(frame.channel, credit_count(frame.payload))
                self._flush_backlog()
            case _:
                raise WireError(f"a {frame.kind.name.lower()} frame on a control link")
        if frame.kind in COUNTED and self.open and (grant := self._lets_send.taken(frame.channel)):
            self._write(Kind.CREDIT, frame.channel, grant.to_bytes(4, "big"))

    def _handle(self, handler: Callable[[ControlLink, dict[str, Any]], None], message: dict[str, Any]) -> None:
        try:
            handler(self, message)
        except WireError:
            raise
        except Exception as error:  # noqa: BLE001  # a handler's fault is not the peer's: the link goes on
            log.error("a handler failed on a message from %s: %s", self.peer.node_id, trail(error))

    # -- pings and the peer's life ----------------------------------------------------------------

    def _answer(self, frame: Frame) -> None:
        if self._out.count(Kind.PONG) >= MAX_UNANSWERED_PINGS:
            raise WireError(f"more than {MAX_UNANSWERED_PINGS} pings without reading the pongs")
        self._write(Kind.PONG, frame.channel, frame.payload)

    def _send_ping(self, filler: bytes = b"", answer: asyncio.Future[float] | None = None) -> None:
        self._write(Kind.PING, 0, self._pings.begin(self._loop.time(), filler, answer), filler)

    def _tick(self) -> None:
        """Judge the peer's silence, and ping it when the link is idle."""
        if self._out.moved() and self._out.waiting:
            self._life.took(self._loop.time())
        judgement = self._life.judge(self._loop.time())
        if judgement.health is Health.DEAD:
            self.mend = SILENT
            self.give_up(judgement.reason)
        elif judgement.health is Health.SUSPECT and self.state == "alive":
            self.state, self.reason = "suspect", judgement.reason
            self._on_state(self, "suspect", self.reason)
        if self.open:
            if judgement.ping and not self._pings.full:
                self._send_ping()
            self._timer = self._loop.call_at(self._life.due, self._tick)

    # -- the end ----------------------------------------------------------------------------------

    def _end(self, state: str, reason: str, *, goodbye: str | None = None) -> None:
        """The link is over; handlers hear of it on the loop's next turn."""
        if self.open:
            self.state, self.reason = state, reason
            on_state = self._on_state
            self._release(goodbye=goodbye)
            self._loop.call_soon(on_state, self, state, reason)

    def _gone(self) -> PeerLost:
        return PeerLost(self.reason or "the link is closed", node=self.peer.node_id, advice=self.mend)

    def _farewell(self, reason: str) -> None:
        """The close frame, if the socket still takes one, and the end of this direction."""
        self._out.farewell(reason)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.recv(READ_BYTES)  # unread input would turn the goodbye into a reset

    def _release(self, *, goodbye: str | None) -> None:
        """Let go of everything, with a close frame first where there is something to say to the peer."""
        if goodbye is not None:
            self._farewell(goodbye)
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._timer.cancel()
        self._out.clear()
        self._backlog.clear()
        self._pings.end(self._gone())
        self._settle()
        # Handlers mostly hold who holds this link: the circle would keep all its buffers until the collector comes by.
        self._on_message = self._on_stream = self._on_frame = None
        self._on_state = _told_no_more
        self.link.close()


def _told_no_more(_link: ControlLink, _state: str, _reason: str) -> None:
    """In place of a handler, once a link has ended."""
