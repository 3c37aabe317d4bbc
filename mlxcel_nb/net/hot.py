"""A link driven by the thread that computes: lowest latency, no loop, no second thread.

One thread owns a `HotLink` and makes every call on it: it seals, sends and waits by itself, always with a deadline
(a `time.monotonic()` value, which moves along while bytes move). Whatever arrives while it waits for something else
is kept for later, so two ends that send at the same time, of any size, never wait for each other. The peer is a
member and may still break: what it makes us hold is bounded by credits.
"""

from __future__ import annotations

import collections
import contextlib
import math
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from mlxcel_nb.errors import MlxcelError, PeerAborted, PeerLost, StepTimeout, WireError
from mlxcel_nb.net.interrupt import Interrupt
from mlxcel_nb.net.link import Link
from mlxcel_nb.net.tag import Tag
from mlxcel_nb.util import times
from mlxcel_nb.wire import messages, tensors
from mlxcel_nb.wire.credits import ReceiveCredits, SendCredits
from mlxcel_nb.wire.frames import MAX_UNANSWERED_PINGS, Frame, Kind, close_reason, credit_count

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["HotLink", "Interrupt", "Tensor", "wait"]

TENSOR_CHANNEL = 1
"""Both directions use the dialling end's first channel."""

READ_BYTES = 256 * 1024

KEPT_BYTES = 64 << 20
"""Tensors that arrived before they were asked for; beyond this the peer gets no credit until they are taken."""

MAX_TENSOR_BYTES = 4 << 30

MAX_SPIN_S = 150e-6
"""Polling longer than this before blocking costs more than it gains when ranks share cores."""


@dataclass(eq=False, slots=True)
class Tensor:
    """A tensor that arrived. `data` is valid until the next call on the link it came by."""

    tag: Tag
    dtype: str
    dims: tuple[int, ...]
    data: memoryview


class Outgoing:
    """Payloads of one message that are still to be sealed, each as soon as the socket and the credits allow."""

    __slots__ = ("_payloads", "channel", "kind", "next")

    def __init__(self, kind: Kind, channel: int, payloads: Iterable[Sequence[ReadableBuffer]]) -> None:
        self.kind = kind
        self.channel = channel
        self._payloads: Iterator[Sequence[ReadableBuffer]] = iter(payloads)
        self.next = next(self._payloads, None)

    def advance(self) -> None:
        self.next = next(self._payloads, None)


class HotLink:
    """Owns a `Link` from here on, for one thread.

    Args:
        spin_s: how long to poll before blocking, `MAX_SPIN_S` at most; 0 unless every rank has a core of its own.
    """

    def __init__(self, link: Link, *, spin_s: float = 0.0) -> None:
        self.link = link
        self.peer = link.peer
        self.node = link.peer.node_id
        self.host = link.peer.address[0]
        self.spin_s = min(spin_s, MAX_SPIN_S)
        self._sock = link.sock
        self._reader = link.reader
        self._sealer = link.sealer
        self._tail: memoryview | None = None  # sealed, not yet with the kernel; nothing is sealed before it is gone
        self._replies: collections.deque[tuple[Kind, int, bytes]] = collections.deque()
        self._may_send = SendCredits()
        self._lets_send = ReceiveCredits()
        self._assembler = tensors.Assembler(limit=MAX_TENSOR_BYTES, place=self._place)
        self._landing = bytearray()
        self._landing_used = False
        self._lent: Tensor | None = None
        self._tensors: collections.deque[Tensor] = collections.deque()
        self._kept_bytes = 0
        self._ungranted = 0
        self._controls: collections.deque[dict[str, Any]] = collections.deque()
        self._tensor_id = 0
        self.moves = 0  # frames taken and chunks sent: what counts as progress
        self._frame_since: float | None = None
        self._broken: MlxcelError | None = None

    def __repr__(self) -> str:
        return f"<hot link to {self.node} at {self.host}>"

    # -- whole operations -------------------------------------------------------------------------

    def send_control(
        self, message: dict[str, Any], *, deadline: float | None = None, interrupt: Interrupt | None = None
    ) -> None:
        """Send one control message."""
        self.begin()
        out = Outgoing(Kind.CONTROL, 0, [[messages.pack(message)]])
        self._drive(out, deadline, interrupt, f"{self.node} to take a message")

    def send_tensor(
        self,
        tag: Tag,
        dtype: str,
        dims: Sequence[int],
        buffer: ReadableBuffer,
        *,
        deadline: float | None = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        """Send one tensor of any size; large ones go in pieces."""
        self.begin()
        out = self.outgoing(tensors.encode(dtype, dims, tag.name, buffer))
        self._drive(out, deadline, interrupt, f"{self.node} to take tensor {tag.name}")

    def recv_control(
        self, *, deadline: float | None = None, interrupt: Interrupt | None = None, what: str = "a message"
    ) -> dict[str, Any]:
        """The next control message.

        Raises:
            PeerLost: the connection ended.
            StepTimeout: nothing came; `what` says what was waited for.
        """
        self.begin()
        waiting = Patience(deadline)
        while not self._controls:
            if interrupt is not None:
                interrupt.check()
            if self.absorb():
                waiting.renew()
                continue
            self.pump_out(None)
            if not self._spun(interrupt):
                wait([self], interrupt, waiting, f"{what} from {self.node}")
        return self._controls.popleft()

    def recv_tensor(self, tag: Tag, *, deadline: float | None = None, interrupt: Interrupt | None = None) -> Tensor:
        """The tensor of `tag`; older ones are dropped.

        Raises:
            PeerAborted: the peer left this step.
            PeerLost, StepTimeout: as above.
        """
        self.begin()
        waiting = Patience(deadline)
        name = tag.name
        while (tensor := self.poll_tensor(tag, name)) is None:
            if interrupt is not None:
                interrupt.check()
            if self.fill():
                waiting.renew()
                continue
            self.pump_out(None)
            if not self._spun(interrupt):
                wait([self], interrupt, waiting, f"tensor {name} from {self.node}")
        if self._replies:
            self.pump_out(None)
        return tensor

    def close(self, reason: str = "") -> None:
        """Say goodbye if the socket takes it, and close. By the owner."""
        with contextlib.suppress(OSError, MlxcelError):
            if self._broken is None and self.pump_out(None):
                self._sock.send(self._sealer.seal_close(reason))
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.recv(READ_BYTES)  # unread input would turn the goodbye into a reset
        self._broken = self._broken or PeerLost("this side has closed the link", node=self.node)
        self.link.close()

    def _drive(self, out: Outgoing, deadline: float | None, interrupt: Interrupt | None, what: str) -> None:
        waiting = Patience(deadline)
        moves = self.moves
        while not self.pump_out(out):
            if interrupt is not None:
                interrupt.check()
            if self.absorb() or self.moves > moves:
                waiting.renew()
                moves = self.moves
            else:
                wait([self], interrupt, waiting, what)

    def _spun(self, interrupt: Interrupt | None) -> bool:
        """Poll for a moment; whether something came."""
        if not self.spin_s:
            return False
        end = time.perf_counter() + self.spin_s
        while not self.fill():
            if time.perf_counter() > end or (interrupt is not None and interrupt.pending):
                return False
        return True

    # -- single moves, none of which blocks (for `Group`) -----------------------------------------

    def begin(self) -> None:
        """A new call: what the last one returned is no longer valid."""
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        self._frame_since = None
        if self._lent is not None:
            self._release(self._lent)
            self._lent = None

    def outgoing(self, parts: Sequence[ReadableBuffer]) -> Outgoing:
        """An encoded tensor, ready for `pump_out`."""
        self._tensor_id = (self._tensor_id + 1) & 0xFFFFFF
        return Outgoing(Kind.TENSOR, TENSOR_CHANNEL, tensors.payloads(parts, self._tensor_id))

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
            elif out.kind is Kind.TENSOR and not self._may_send.spend(out.channel):
                return False
            else:
                self._tail = self._sealer.seal(out.kind, out.channel, *out.next)
                out.advance()

    def fill(self) -> bool:
        """Read once; whether anything came."""
        try:
            count = self._sock.recv_into(self._reader.get_buffer(READ_BYTES))
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
        if self._lent is not None:
            self._keep_own(self._lent)
        before = self.moves
        while (frame := self._next_frame()) is not None:
            if (tensor := self._dispatch(frame)) is not None:
                self._keep(tensor)
        return self.moves > before

    def poll_tensor(self, tag: Tag, name: str) -> Tensor | None:
        """The tensor of `tag` if it has arrived. `name` is `tag.name`, which the caller has at hand."""
        while self._tensors and self._tensors[0].tag < tag:
            self._release(self._pop())
        if self._tensors and self._tensors[0].tag == tag:
            return self._lend(self._pop())
        while (frame := self._next_frame()) is not None:
            tensor = self._dispatch(frame, tag, name)
            if tensor is None:
                continue
            if tensor.tag == tag:
                return self._lend(tensor)
            if tensor.tag > tag:
                self._keep(tensor)
            else:
                self._release(tensor)
        if self._controls:
            self._heed_abort(tag)
        return None

    # -- frames -----------------------------------------------------------------------------------

    def _next_frame(self) -> Frame | None:
        try:
            frame = self._reader.next_frame()
        except WireError as error:
            self._refuse(error)
        if frame is not None:
            self.moves += 1
            self._frame_since = None
        return frame

    def _dispatch(self, frame: Frame, tag: Tag | None = None, name: str = "") -> Tensor | None:
        """Deal with one frame; the tensor, if it completes one."""
        try:
            if frame.kind is Kind.TENSOR:
                return self._take_tensor(frame, tag, name)
            if frame.kind is Kind.CONTROL:
                self._controls.append(messages.unpack(frame.payload))
            elif frame.kind is Kind.CREDIT:
                self._may_send.grant(frame.channel, credit_count(frame.payload))
            elif frame.kind is Kind.PING:
                if len(self._replies) >= 2 * MAX_UNANSWERED_PINGS:
                    raise WireError(f"more than {MAX_UNANSWERED_PINGS} pings without reading the pongs")
                self._replies.append((Kind.PONG, frame.channel, bytes(frame.payload)))
            elif frame.kind is Kind.CLOSE:
                self._lost(f"closed by it: {close_reason(frame.payload) or 'no reason given'}")
            elif frame.kind is not Kind.PONG:
                raise WireError(f"a {frame.kind.name.lower()} frame on a hot link")
        except WireError as error:
            self._refuse(error)
        return None

    def _take_tensor(self, frame: Frame, tag: Tag | None, name: str) -> Tensor | None:
        self._lets_send.received(frame.channel)
        if self._kept_bytes > KEPT_BYTES:
            self._ungranted += 1
        else:
            self._grant(frame.channel)
        whole = self._assembler.add(frame.channel, frame.payload)
        if whole is None:
            return None
        header, data = whole
        # A sender finishes one tensor before it begins the next: what is incomplete now was abandoned.
        self._assembler.discard()
        if self._landing_used:
            in_use = [data, *(t.data for t in self._tensors), *([self._lent.data] if self._lent else [])]
            self._landing_used = any(view.obj is self._landing for view in in_use)
        same = tag is not None and header.name == name
        return Tensor(tag if same and tag else Tag.parse(header.name), header.dtype, header.dims, data)

    def _grant(self, channel: int) -> None:
        if count := self._lets_send.taken(channel):
            self._replies.append((Kind.CREDIT, channel, count.to_bytes(4, "big")))

    def _heed_abort(self, tag: Tag) -> None:
        """Leave the step when the peer says so; forget aborts of what is over."""
        for message in list(self._controls):
            if message.get("type") != "abort":
                continue
            epoch, step = message.get("epoch"), message.get("step", -1)
            if not isinstance(epoch, int) or not isinstance(step, int):
                self._refuse(WireError("an abort without epoch and step"))
            self._controls.remove(message)
            if epoch > tag.epoch or (epoch == tag.epoch and (step < 0 or step >= tag.step)):
                error = message.get("error")
                details = error if isinstance(error, dict) else {}
                raise PeerAborted(
                    str(details.get("cause") or "the step was given up"),
                    node=str(details.get("node") or self.node),
                    advice=details.get("advice"),
                )

    # -- memory of what arrives -------------------------------------------------------------------

    def _place(self, header: tensors.TensorHeader, size: int) -> memoryview:
        """Where a tensor in pieces is put together: the same memory each time, unless it is still in use."""
        del header
        if self._landing_used:
            return memoryview(bytearray(size))
        if len(self._landing) < size:
            self._landing = bytearray(size)
        self._landing_used = True
        return memoryview(self._landing)[:size]

    def _lend(self, tensor: Tensor) -> Tensor:
        self._lent = tensor
        return tensor

    def _keep(self, tensor: Tensor) -> None:
        self._keep_own(tensor)
        self._tensors.append(tensor)
        self._kept_bytes += len(tensor.data)

    @staticmethod
    def _keep_own(tensor: Tensor) -> None:
        """Copy `tensor` out of the buffer frames are opened into, if it lies there."""
        if tensor.data.readonly:
            tensor.data = memoryview(bytearray(tensor.data))

    def _pop(self) -> Tensor:
        tensor = self._tensors.popleft()
        self._kept_bytes -= len(tensor.data)
        while self._ungranted and self._kept_bytes <= KEPT_BYTES:
            self._ungranted -= 1
            self._grant(TENSOR_CHANNEL)
        return tensor

    def _release(self, tensor: Tensor) -> None:
        if tensor.data.obj is self._landing:
            self._landing_used = False

    # -- ends -------------------------------------------------------------------------------------

    def _lost(self, why: str) -> NoReturn:
        self._broken = PeerLost(f"connection to host {self.host} lost: {why}", node=self.node)
        raise self._broken

    def _lost_while_sending(self, error: OSError) -> NoReturn:
        """Before giving up, read what the peer said last: its reason is better than ours."""
        self._tail = None
        while self.absorb():
            pass
        self._lost(f"reset ({error.strerror})")

    def _refuse(self, error: WireError) -> NoReturn:
        """The peer broke the contract: tell it, and end."""
        if isinstance(self._broken, PeerLost):
            raise self._broken
        self._broken = error.at(self.node)
        with contextlib.suppress(OSError, MlxcelError):
            if self._tail is None:
                self._sock.send(self._sealer.seal_close(error.cause))
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


class Patience:
    """A deadline that moves along while there is progress."""

    __slots__ = ("budget_s", "deadline")

    def __init__(self, deadline: float | None) -> None:
        now = time.monotonic()
        self.deadline = now + times.STEP_S if deadline is None else deadline
        self.budget_s = max(0.0, self.deadline - now)

    def renew(self) -> None:
        self.deadline = time.monotonic() + self.budget_s


def wait(links: Sequence[HotLink], interrupt: Interrupt | None, patience: Patience, what: str) -> None:
    """Block until one of `links` can read (or write, where it has something to), without using the processor.

    Raises:
        StepTimeout: when `patience` ends; names the first of `links` and `what`.
    """
    poller = select.poll()
    for link in links:
        poller.register(link.link.sock, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
    if interrupt is not None:
        poller.register(interrupt, select.POLLIN)
    now = time.monotonic()
    due = {link.frame_due(now): link for link in links}
    first = min(due)
    left = min(patience.deadline, first) - now
    if left > 0 and poller.poll(math.ceil(left * 1000)):
        if interrupt is not None:
            interrupt.check()
        return
    if first <= patience.deadline:
        due[first].frame_overdue()
    raise StepTimeout(
        f"no progress for {patience.budget_s:.3g} s while waiting for {what} (host {links[0].host})",
        node=links[0].node,
        advice="The node may be stopped, overloaded or cut off.",
    )
