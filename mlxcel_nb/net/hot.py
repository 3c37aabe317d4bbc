"""A link driven by the thread that computes: lowest latency, no loop, no second thread.

One thread owns a `HotLink` and makes every call on it: it seals, sends and waits by itself, always with a deadline
(a `time.monotonic()` value, which moves along while bytes move). Whatever arrives while it waits for something else
is kept for later, so two ends that send at the same time, of any size, never wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxcel_nb.net.inbox import Tensor
from mlxcel_nb.net.interrupt import Interrupt
from mlxcel_nb.net.line import Line
from mlxcel_nb.net.link import Link
from mlxcel_nb.net.outgoing import Outgoing
from mlxcel_nb.net.tag import Tag
from mlxcel_nb.net.waiting import Patience, wait
from mlxcel_nb.wire import messages, tensors
from mlxcel_nb.wire.frames import Kind

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["MAX_SPIN_S", "HotLink", "Interrupt"]

MAX_SPIN_S = 150e-6
"""Polling longer than this before blocking costs more than it gains when ranks share cores."""


class HotLink(Line):
    """Owns a `Link` from here on, for one thread.

    Args:
        spin_s: how long to poll before blocking, `MAX_SPIN_S` at most; 0 unless every rank has a core of its own.
    """

    def __init__(self, link: Link, *, spin_s: float = 0.0) -> None:
        super().__init__(link)
        self.spin_s = min(spin_s, MAX_SPIN_S)

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
        return self._controls.next()

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
        return tensor

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
