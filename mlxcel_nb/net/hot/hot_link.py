"""A link driven by the thread that computes: lowest latency, no loop, no second thread.

One thread owns a `HotLink` and makes every call on it: it seals, sends and waits by itself, always with a deadline
(a `time.monotonic()` value, which moves along while bytes move). Whatever arrives while it waits for something else
is kept for later, so two ends that send at the same time, of any size, never wait for each other.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxcel_nb.errors import WireError
from mlxcel_nb.net.hot.inbox import Tensor
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.hot.line import Line
from mlxcel_nb.net.hot.moulds import SHORT_BYTES, Shape, keep
from mlxcel_nb.net.hot.outgoing import Outgoing
from mlxcel_nb.net.hot.spin import MAX_SPIN_S, Spin
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.hot.waiting import Patience, wait
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.wire import messages, tensors
from mlxcel_nb.wire.dtypes import dtype_named
from mlxcel_nb.wire.frames import Kind, bytes_of
from mlxcel_nb.wire.mould import Mould

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["MAX_SPIN_S", "HotLink", "Interrupt"]


class HotLink(Line):
    """Owns a `Link` from here on, for one thread.

    Args:
        spin_s: how long to poll before blocking, `MAX_SPIN_S` at most; 0 unless every rank has a core of its own.
    """

    def __init__(self, link: Link, *, spin_s: float = 0.0) -> None:
        super().__init__(link)
        self.spin = Spin(min(spin_s, MAX_SPIN_S))
        self._shapes: dict[tuple[str, tuple[int, ...]], Shape] = {}
        # Of the last small tensor that went, and of the last that came: the next is likely to be as it was.
        self._usual_out: Shape | None = None
        self._usual_in: Shape | None = None

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
        """Send one tensor of any size; large ones go in pieces.

        Args:
            buffer: the data, as many bytes as `dtype` and `dims` say: little-endian and in C order, or strided, which
                costs a copy. What this link has lent may be sent as it is.

        Raises:
            WireError: `dtype`, `dims` and `buffer` contradict each other; the link goes on.
            PeerLost, StepTimeout: as below.
        """
        out = self._laid_out(tag, dtype, dims, buffer)
        if out is not None and self._broken is None and self.put(out):
            if self._tail is None and not self._replies:
                return
            rest = None
        else:
            dims = tuple(map(operator.index, dims))
            rest = self.outgoing(tensors.encode(dtype, dims, tag.name, self._inbox.apart(bytes_of(buffer))))
        self.begin()
        self._drive(rest, deadline, interrupt, f"{self.node} to take tensor {tag.name}")

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
        return self._controls.next()

    def recv_tensor(
        self,
        tag: Tag,
        *,
        into: memoryview | None = None,
        deadline: float | None = None,
        interrupt: Interrupt | None = None,
    ) -> Tensor:
        """The tensor of `tag`; older ones are dropped.

        Args:
            into: memory to receive into, as many bytes as the tensor has, writable and in one piece, which a large
                one is decrypted straight to. What it holds after an error is undefined, but no longer changes.

        Raises:
            PeerAborted: the peer left this step.
            WireError: the tensor is not as large as `into`.
            PeerLost, StepTimeout: as above.
        """
        if into is None:
            return self._recv_tensor(tag, deadline, interrupt)
        room = bytes_of(into)
        if room.nbytes and (room.readonly or room.obj is not into.obj):
            raise ValueError("memory to receive into is read-only or strided")
        self.expect(tag.name, room)
        try:
            tensor = self._recv_tensor(tag, deadline, interrupt)
        finally:
            self.expect("", None)
        if len(tensor.data) != len(room):
            raise WireError(f"tensor {tag.name} has {len(tensor.data)} bytes, {len(room)} are due", node=self.node)
        if tensor.data.obj is not room.obj:
            room[:] = tensor.data
            tensor.data = room
        return tensor

    def _recv_tensor(self, tag: Tag, deadline: float | None, interrupt: Interrupt | None) -> Tensor:
        self.begin()
        if interrupt is not None:
            interrupt.check()
        if self._usual_in is not None and (short := self._take_usual(self._usual_in, tag)) is not None:
            return short
        name = tag.name
        waiting = Patience(deadline)
        while (tensor := self.poll_tensor(tag, name)) is None:
            if interrupt is not None:
                interrupt.check()
            if (abort := self.abort(tag)) is not None:
                raise abort.error
            if self.fill():
                waiting.renew()
                continue
            self.pump_out(None)
            if not self._spun(interrupt):
                wait([self], interrupt, waiting, f"tensor {name} from {self.node}")
        if self._replies:
            self.pump_out(None)
        self._usual_in = self._shape(tensor.dtype, tensor.dims, len(tensor.data))
        return tensor

    def _laid_out(self, tag: Tag, dtype: str, dims: Sequence[int], buffer: ReadableBuffer) -> Mould | None:
        """The tensor in a mould, ready to be sealed, if it is small enough for one."""
        data = buffer if type(buffer) is memoryview and buffer.format == "B" else bytes_of(buffer)
        shape = self._usual_out
        if shape is None or shape.dims != dims or shape.dtype != dtype or shape.size != len(data):
            shape = self._usual_out = self._shape(dtype, tuple(map(operator.index, dims)), len(data))
        if shape is None:
            return None
        try:
            return shape.lay_out(tag.encoded, data, 1).out
        except (
            ValueError
        ):  # a view of several dimensions, which is not asked for its `ndim`: that would cost all others
            return shape.lay_out(tag.encoded, bytes_of(data), 1).out

    def _shape(self, dtype: str, dims: tuple[int, ...], size: int) -> Shape | None:
        """What is at hand for a tensor of `size` bytes; None where it has to go the long way."""
        shape = self._shapes.get((dtype, dims))
        if shape is None and size <= SHORT_BYTES and size == dtype_named(dtype).itemsize * math.prod(dims):
            shape = keep(self._shapes, Shape(dtype, dims, size))
        return shape if shape is not None and shape.size == size else None

    def _take_usual(self, shape: Shape, tag: Tag) -> Tensor | None:
        """The tensor of `tag`, if it has the usual shape and comes while it is polled for."""
        moulds = shape.moulds_for(tag.encoded, 1)
        tensor = Tensor(tag, shape.dtype, shape.dims, moulds.views[0])
        if self._replies:
            self.pump_out(None)
        return tensor if self.take(moulds.ins[0], shape.head(tag.encoded), self.spin) else None

    def _drive(self, out: Outgoing | None, deadline: float | None, interrupt: Interrupt | None, what: str) -> None:
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
        end = self.spin.until()
        while not self.fill():
            if time.perf_counter() > end or (interrupt is not None and interrupt.pending):
                self.spin.missed()
                return False
        return True
