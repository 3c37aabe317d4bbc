"""Tensors that go to several peers and come from several at once, in whatever order the sockets allow.

Owned by the thread that computes, as its hot links are. Nobody waits for one peer while another could be served, so
ranks that all send before they receive never block each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.hot.controls import Abort
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.inbox import Tensor
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.hot.outgoing import Outgoing
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.hot.waiting import Patience, wait


class Left(Exception):  # never leaves `net`: `Group` makes one of our errors of it
    """A peer has left the step that this rank waits in.

    Args:
        waits_for: node that this rank itself is waiting for.
    """

    def __init__(self, link: HotLink, abort: Abort, waits_for: str) -> None:
        super().__init__(str(abort.error))
        self.link = link
        self.abort = abort
        self.waits_for = waits_for


@dataclass(eq=False, slots=True)
class Leg:
    """What is still to be done with one peer."""

    link: HotLink
    out: Outgoing | None = None
    due: bool = True
    """Whether a tensor has to come from it."""
    got: Tensor | None = None
    sent: bool = False

    def move(self, tag: Tag, name: str) -> bool:
        """Send and receive what can be at once; whether anything moved."""
        link = self.link
        moves = link.moves
        if not self.sent:
            self.sent = link.pump_out(self.out)
        elif link.wants_write:
            link.pump_out(None)
        if self.got is not None or not self.due:
            # Sending may still wait for the peer's credits, which come as frames.
            return not self.sent and (link.absorb() or link.moves > moves)
        self.got = link.poll_tensor(tag, name)
        return link.moves > moves or (self.got is None and link.fill())

    @property
    def done(self) -> bool:
        return self.sent and (self.got is not None or not self.due)


def run(
    legs: Sequence[Leg], tag: Tag, name: str, others: Sequence[HotLink], interrupt: Interrupt | None,
    waiting: Patience,
) -> None:  # fmt: skip
    """Move every leg to its end.

    Args:
        name: `tag.name`, which the caller has at hand.
        others: links that are listened to as well, for a peer that says it has left.

    Raises:
        Left: a peer has left the step.
        PeerLost, WireError, StepTimeout: as `HotLink`.
    """
    active = list(legs)
    while True:
        if interrupt is not None and interrupt.pending is not None:
            interrupt.check()
        moved = False
        for leg in active:
            moved |= leg.move(tag, name)
        active = [leg for leg in active if not leg.done]
        if not active:
            return
        if moved:
            waiting.renew()
            continue
        links = [leg.link for leg in active]
        for link in links:
            heed(link, tag, links[0].node)
        idle = [link for link in others if link not in links and not link.broken]
        for link in idle:  # before the wait, as what came together with a tensor has been read, and wakes nobody
            listen(link, tag, links[0].node)
        wait(links, interrupt, waiting, f"exchange {name} with {', '.join(link.node for link in links)}", idle)


def heed(link: HotLink, tag: Tag, waits_for: str) -> None:
    """Leave the step if the peer of `link` has.

    Raises:
        Left: it has.
    """
    if (abort := link.abort(tag)) is not None:
        raise Left(link, abort, waits_for)


def listen(link: HotLink, tag: Tag, waits_for: str) -> None:
    """Hear what a peer says that nothing is due from; if it is gone, that is for those to say who need it.

    What an earlier call could not get rid of goes on its way: a link that could send would not let us sleep.
    """
    try:
        link.absorb()
        if link.wants_write:
            link.pump_out(None)
    except MlxcelError:
        return
    heed(link, tag, waits_for)
