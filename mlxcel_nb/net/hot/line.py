"""One connection as the thread that owns it moves it along: sends and reads, none of which block.

`HotLink` makes whole operations of these, and `Group` collectives. The peer is a member and may still break: what it
makes us hold is bounded by credits, and what breaks the contract ends the link, with an error that names the peer.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import math
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mlxcel_nb.errors import FrameError, MlxcelError, PeerLost, WireError
from mlxcel_nb.net.hot.controls import Abort, Controls
from mlxcel_nb.net.hot.inbox import TENSOR_CHANNEL, Inbox, Tensor
from mlxcel_nb.net.hot.outgoing import Outgoing
from mlxcel_nb.net.hot.spin import Spin
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.stream import Stream
from mlxcel_nb.util import times
from mlxcel_nb.wire import messages, tensors
from mlxcel_nb.wire.credits import COUNTED, SendCredits
from mlxcel_nb.wire.frame_reader import READ_BYTES, FrameReader
from mlxcel_nb.wire.frames import MAX_UNANSWERED_PINGS, Frame, Kind, Sealer, close_reason, credit_count
from mlxcel_nb.wire.mould import Mould

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


LAST_WORDS_S = 1.0
"""For reading what a peer has said that takes no more: it is there already, as much as buffers hold."""


class Line:
    """Owns a `Link` from here on, for one thread."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.peer = link.peer
        self.node = link.peer.node_id
        self.host = link.peer.address[0]
        self._sock: Stream = link.sock
        self._reader = link.reader
        self._sealer = link.sealer
        self._tail: memoryview | None = None  # sealed, not yet with the kernel; nothing is sealed before it is gone
        self._replies: collections.deque[tuple[Kind, int, bytes]] = collections.deque()
        self._may_send = SendCredits()
        self._credit = self._may_send.window(TENSOR_CHANNEL)
        self._inbox = Inbox(self._grant)
        self._controls = Controls()
        self._tensor_id = 0
        self.moves = 0  # frames taken and chunks sent: what counts as progress
        self._frame_since: float | None = None
        self.watched_until = 0.0  # when a wait on this link last ended
        self._broken: MlxcelError | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<hot link to {self.node} at {self.host}>"

    def close(self, reason: str = "") -> None:
        """Say goodbye if the socket takes it, and close; twice is once. By the owner."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError, MlxcelError):
            if self._broken is None:
                self.pump_out(None)
                self._goodbye(reason)
            self._sock.recv(READ_BYTES)  # unread input would turn the goodbye into a reset
        # A copy, as the error that was raised holds the frames it passed, and they hold this link with all its buffers.
        self._broken = copy.copy(self._broken or PeerLost("this side has closed the link", node=self.node))
        self._inbox.end()
        if self._sock is not self.link.sock:
            self._sock.close()
        self.link.close()

    def move(self, stream: Stream, sealer: Sealer, reader: FrameReader, transport: str) -> None:
        """Use `stream` in place of the socket from the next frame on; the socket then only tells when the peer is gone.

        Args:
            sealer, reader: with keys of their own, for a counter is never shared.
            transport: what the link's status calls it.
        """
        self._sock, self._sealer = stream, sealer
        self._reader = self.link.reader = reader
        self.link.transport = transport

    def fileno(self) -> int:
        """What to poll."""
        return self._sock.fileno()

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def tell(self, message: dict[str, Any]) -> None:
        """Send a control message as far as the socket takes it now; the rest goes with what is sent next."""
        self._replies.append((Kind.CONTROL, 0, messages.pack(message)))
        self.pump_out(None)

    def expect(self, name: str, into: memoryview | None) -> None:
        """Where the tensor called `name` shall go, if it is large; None forgets the wish."""
        self._inbox.expect(name, into)

    def begin(self) -> None:
        """A new call: what the last one returned is no longer valid."""
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        if self._frame_since is not None:
            # While nobody waited here, the rest may have waited for us.
            now = time.monotonic()
            self._frame_since += now - self.watched_until
            self.watched_until = now
        self._inbox.reclaim()

    def outgoing(self, parts: Sequence[ReadableBuffer]) -> Outgoing:
        """An encoded tensor, ready for `pump_out`."""
        if sum(memoryview(part).nbytes for part in parts) <= tensors.PART_BYTES:
            return Outgoing(Kind.TENSOR, TENSOR_CHANNEL, (parts,))
        self._tensor_id = (self._tensor_id + 1) & 0xFFFFFF
        return Outgoing(Kind.TENSOR, TENSOR_CHANNEL, tensors.payloads(parts, self._tensor_id))

    @property
    def credit(self) -> int:
        """Frames of tensors that the peer lets us send, as far as we have heard."""
        return self._credit.left

    @property
    def wants_write(self) -> bool:
        return self._tail is not None or bool(self._replies)

    def pump_out(self, out: Outgoing | None) -> bool:
        """Send what the socket takes: the rest of a frame first, answers next, then `out`. True when all is gone."""
        while True:
            if self._tail is not None:
                try:
                    sent = self._sock.send(self._tail)
                except BlockingIOError:
                    return False
                except OSError as error:
                    self._lost_while_sending(error)
                self.moves += 1
                if sent < len(self._tail):
                    self._tail = self._tail[sent:]
                    continue
                self._tail = None
            if self._replies:
                kind, channel, payload = self._replies.popleft()
                self._tail = self._sealer.seal(kind, channel, payload)
            elif out is None or out.next is None:
                return True
            elif out.kind in COUNTED and not self._may_send.spend(out.channel):
                return False
            else:
                self._tail = self._sealer.seal(out.kind, out.channel, *out.next)
                out.advance()

    def fill(self) -> bool:
        """Read once; whether anything came."""
        try:
            count = self._sock.recv_into(self._reader.room())
        except BlockingIOError:
            return False
        except OSError as error:
            self._lost(f"reset ({error.strerror})")
        if not count:
            self._lost("it ended without a goodbye")
        self._reader.received(count)
        return True

    def absorb(self) -> bool:
        """Deal with what has been read, or read once and deal with that; whether there was anything."""
        return self._sort() or (self.fill() and (self._sort() or True))

    def _sort(self) -> bool:
        """Put every whole frame that has been read where it belongs; whether there was any."""
        self._inbox.detach()
        before = self.moves
        while (frame := self._next_frame()) is not None:
            if (tensor := self._dispatch(frame)) is not None:
                self._inbox.keep(tensor)
        return self.moves > before

    def poll_tensor(self, tag: Tag, name: str) -> Tensor | None:
        """The tensor of `tag` if it has arrived. `name` is `tag.name`, which the caller has at hand."""
        if (kept := self._inbox.find(tag)) is not None:
            return kept
        while (frame := self._next_frame()) is not None:
            tensor = self._dispatch(frame, tag, name)
            if tensor is None:
                continue
            if tensor.tag == tag:
                return self._inbox.lend(tensor)
            if tensor.tag > tag:
                self._inbox.keep(tensor)
        return None

    def abort(self, tag: Tag) -> Abort | None:
        """What the peer said, if it has left the step of `tag`."""
        if not self._controls:
            return None
        try:
            return self._controls.abort(tag, self.node)
        except WireError as error:
            self._refuse(error)

    # -- the short way, for a tensor that fits a frame --------------------------------------------

    def put(self, mould: Mould) -> bool:
        """Seal and send the tensor that lies in `mould`. False, and nothing done, where something stands before it."""
        if (self._tail is not None or self._replies) and not self.pump_out(None):
            return False
        if not self._credit.spend():
            return False
        frame = self._sealer.seal_mould(mould)
        try:
            sent = self._sock.send(frame)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lost_while_sending(error)
        self.moves += 1
        if sent < len(frame):
            self._tail = memoryview(bytes(frame[sent:]))  # the mould is wanted for the next peer
        self._sealer.make_ready()
        return True

    def take(self, mould: Mould, head: bytes, spin: Spin) -> bool:
        """Receive into `mould` the tensor that `head` leads, if that is what comes next.

        False where it is not: the long way finds out why.

        Args:
            spin: how long to poll for it; learns what came of it.
        """
        reader = self._reader
        if reader.bytes_pending or self._controls.kept or not self._inbox.empty:
            return False
        opener = reader.opener
        opener.make_ready()
        got = self._receive(mould.frame, mould.whole, spin)
        if got < mould.whole or mould.claimed[0] != mould.due:
            reader.feed(mould.frame[:got])
            return False
        # From here on every microsecond counts: the peer, and what is computed next, wait for what has come.
        try:
            opener.open_mould(mould)
            reader.total += got
            self.moves += 1
            if mould.head.tobytes() == head:
                self._inbox.passed += 1
                return True
            other = opener.frame(mould.plain)
        except WireError as error:
            self._refuse(error)
        if other.kind is not Kind.REKEY and (tensor := self._dispatch(other)) is not None:
            self._inbox.keep(tensor)
        return False

    def _receive(self, frame: memoryview, whole: int, spin: Spin) -> int:
        """Poll for the `whole` bytes of `frame`; how many came."""
        recv_into, until, got = self._sock.recv_into, 0.0, 0
        while True:
            try:
                count = recv_into(frame[got:] if got else frame)
            except BlockingIOError:
                until = until or spin.until()
                if time.perf_counter() < until:
                    continue
                spin.missed()
                return got
            except OSError as error:
                if not got:
                    self._lost(f"reset ({error.strerror})")
                return got
            if not count:
                if not got:
                    self._lost("it ended without a goodbye")
                return got  # what came before the end is read first: it may say why
            got += count
            if got >= whole:
                return got

    # -- frames -----------------------------------------------------------------------------------

    def _next_frame(self) -> Frame | None:
        inbox, reader = self._inbox, self._reader
        try:
            while (plain := reader.next_plain(inbox.landing)) is not None:
                self.moves += 1
                self._frame_since = None
                frame = reader.opener.frame(plain)
                if frame.kind is not Kind.REKEY:
                    return frame
                inbox.settle()
        except WireError as error:
            self._refuse(error)
        return None

    def _dispatch(self, frame: Frame, tag: Tag | None = None, name: str = "") -> Tensor | None:
        """Deal with one frame; the tensor, if it completes one."""
        try:
            if frame.kind is Kind.TENSOR:
                return self._inbox.add(frame, tag, name)
            if frame.kind is Kind.CONTROL:
                self._controls.keep(messages.unpack(frame.payload), len(frame.payload))
            elif frame.kind is Kind.CREDIT:
                self._may_send.grant(frame.channel, credit_count(frame.payload))
            elif frame.kind is Kind.PING:
                if len(self._replies) >= 2 * MAX_UNANSWERED_PINGS:
                    raise WireError(f"more than {MAX_UNANSWERED_PINGS} pings without reading the pongs")
                self._replies.append((Kind.PONG, frame.channel, bytes(frame.payload)))
            elif frame.kind is Kind.CLOSE:
                self._goodbye("")
                self._lost(f"closed by it: {close_reason(frame.payload) or 'no reason given'}")
            elif frame.kind is not Kind.PONG:
                raise WireError(f"a {frame.kind.name.lower()} frame on a hot link")
            self._inbox.settle()
        except WireError as error:
            self._refuse(error)
        return None

    def _grant(self, channel: int, count: int) -> None:
        if self._replies and self._replies[-1][:2] == (Kind.CREDIT, channel):  # or they would pile up unread
            count += credit_count(self._replies.pop()[2])
        self._replies.append((Kind.CREDIT, channel, count.to_bytes(4, "big")))

    # -- ends -------------------------------------------------------------------------------------

    def _lost(self, why: str) -> NoReturn:
        self._broken = PeerLost(f"connection to host {self.host} lost: {why}", node=self.node)
        raise self._broken

    def _lost_while_sending(self, error: OSError) -> NoReturn:
        """Before giving up, read what the peer said last: its reason is better than ours."""
        self._tail = None
        end = time.monotonic() + LAST_WORDS_S
        while self.absorb() and time.monotonic() < end:
            pass
        self._lost(f"reset ({error.strerror})")

    def _goodbye(self, reason: str) -> None:
        """The close frame, behind the rest of another if there is one, as far as the socket takes them."""
        try:
            sent = self._sock.send(self._tail) if self._tail is not None else 0
            if self._tail is None or sent == len(self._tail):
                self._sock.send(self._sealer.seal_close(reason))
            self._tail = None
        except (OSError, FrameError):
            return  # the peer takes no more, or has been told already
        finally:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def _refuse(self, error: WireError) -> NoReturn:
        """The peer broke the contract: tell it, and end."""
        if isinstance(self._broken, PeerLost):
            raise self._broken
        self._broken = error.at(self.node)
        self._goodbye(error.cause)
        self.link.hang_up()
        raise self._broken

    def frame_due(self, now: float) -> float:
        """When the rest of a frame that has begun must be here; far off when none has."""
        if not self._reader.bytes_pending:
            return math.inf
        if self._frame_since is None:
            self._frame_since = now
        return self._frame_since + times.FRAME_REST_S

    def frame_overdue(self) -> NoReturn:
        self._refuse(WireError(f"the rest of a frame did not come within {times.FRAME_REST_S:g} s"))
