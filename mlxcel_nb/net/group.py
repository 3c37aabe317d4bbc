"""Collectives among the ranks of a stage, by direct exchange, and tensors between stages.

Owned by the thread that computes, as its hot links are. Nothing is summed here: every rank gets every buffer in rank
order and adds them in that order, so all ranks hold the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxcel_nb.net.hot import HotLink, Outgoing
from mlxcel_nb.net.inbox import Tensor
from mlxcel_nb.net.interrupt import Interrupt
from mlxcel_nb.net.tag import Tag
from mlxcel_nb.net.waiting import Patience, wait
from mlxcel_nb.wire import tensors
from mlxcel_nb.wire.frames import bytes_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["Group", "Tag", "recv_from", "send_to"]

SPIN_BYTES = 256 * 1024
"""Larger buffers gain nothing from polling: reading them in crumbs costs more than waking up late."""


@dataclass(eq=False, slots=True)
class _Exchange:
    """What is still to be done with one peer in one collective."""

    rank: int
    link: HotLink
    out: Outgoing
    sent: bool = False
    got: Tensor | None = None

    def move(self, tag: Tag, name: str) -> bool:
        """Send and receive what can be at once; whether anything moved."""
        link = self.link
        moves = link.moves
        if not self.sent:
            self.sent = link.pump_out(self.out)
        elif link.wants_write:
            link.pump_out(None)
        if self.got is not None:
            # Sending may still wait for the peer's credits, which come as frames.
            return not self.sent and (link.absorb() or link.moves > moves)
        self.got = link.poll_tensor(tag, name)
        return link.moves > moves or (self.got is None and link.fill())

    @property
    def done(self) -> bool:
        return self.sent and self.got is not None


class Group:
    """The ranks that exchange partial results.

    Args:
        rank: this member's rank, which is not a key of `links`.
        links: hot links by rank of the peer.
        interrupt: breaks every wait.
    """

    def __init__(self, rank: int, links: Mapping[int, HotLink], interrupt: Interrupt | None = None) -> None:
        self.rank = rank
        self.size = len(links) + 1
        if sorted([rank, *links]) != list(range(self.size)):
            raise ValueError(f"ranks {sorted([rank, *links])} are not 0 to {self.size - 1}")
        self._links = dict(sorted(links.items()))
        self._interrupt = interrupt
        self._spin_s = min((link.spin_s for link in links.values()), default=0.0)

    def all_gather(self, tag: Tag, buffer: ReadableBuffer, *, deadline: float | None = None) -> list[memoryview]:
        """Every rank's buffer, in rank order, this rank's own included.

        The buffers of the others are valid until the next call. Frames of older tags are dropped.

        Args:
            tag: the same on every rank.
            deadline: a `time.monotonic()` value, which moves along while bytes move; 30 s from now by default.

        Raises:
            PeerLost: a peer's connection ended; the error names it.
            PeerAborted: a peer left this step.
            StepTimeout: no progress; the error names the first peer that is missing.
        """
        own = bytes_of(buffer)
        name = tag.name
        parts = tensors.encode("uint8", (len(own),), name, own)
        exchanges = []
        for rank, link in self._links.items():
            link.begin()
            exchanges.append(_Exchange(rank, link, link.outgoing(parts)))
        spin_s = self._spin_s if len(own) <= SPIN_BYTES else 0.0
        self._exchange(exchanges, tag, name, Patience(deadline), spin_s)
        gathered = [own] * self.size
        for exchange in exchanges:
            assert exchange.got is not None
            if exchange.link.wants_write:
                exchange.link.pump_out(None)
            gathered[exchange.rank] = exchange.got.data
        return gathered

    def _exchange(self, exchanges: Sequence[_Exchange], tag: Tag, name: str, waiting: Patience, spin_s: float) -> None:
        interrupt = self._interrupt
        spin_end = 0.0
        while exchanges:
            if interrupt is not None and interrupt.pending is not None:
                interrupt.check()
            moved = False
            for exchange in exchanges:
                moved |= exchange.move(tag, name)
            exchanges = [exchange for exchange in exchanges if not exchange.done]
            if moved:
                waiting.renew()
                spin_end = 0.0
                continue
            if not exchanges:
                return
            if spin_s:
                now = time.perf_counter()
                spin_end = spin_end or now + spin_s
                if now < spin_end:
                    continue
            links = [exchange.link for exchange in exchanges]
            wait(links, interrupt, waiting, f"exchange {name} with {', '.join(link.node for link in links)}")

    def send_to(
        self, rank: int, tag: Tag, dtype: str, dims: Sequence[int], buffer: ReadableBuffer, *,
        deadline: float | None = None,
    ) -> None:  # fmt: skip
        """Send a tensor to one rank."""
        send_to(self._links[rank], tag, dtype, dims, buffer, deadline=deadline, interrupt=self._interrupt)

    def recv_from(
        self, rank: int, tag: Tag, *, deadline: float | None = None
    ) -> tuple[str, tuple[int, ...], memoryview]:
        """Receive the tensor of `tag` from one rank."""
        return recv_from(self._links[rank], tag, deadline=deadline, interrupt=self._interrupt)


def send_to(
    link: HotLink,
    tag: Tag,
    dtype: str,
    dims: Sequence[int],
    buffer: ReadableBuffer,
    *,
    deadline: float | None = None,
    interrupt: Interrupt | None = None,
) -> None:
    """Send a tensor, activations of any size, over `link`."""
    link.send_tensor(tag, dtype, dims, buffer, deadline=deadline, interrupt=interrupt)


def recv_from(
    link: HotLink, tag: Tag, *, deadline: float | None = None, interrupt: Interrupt | None = None
) -> tuple[str, tuple[int, ...], memoryview]:
    """Element type, shape and bytes of the tensor of `tag`; the bytes are valid until the next call on `link`."""
    tensor = link.recv_tensor(tag, deadline=deadline, interrupt=interrupt)
    return tensor.dtype, tensor.dims, tensor.data
