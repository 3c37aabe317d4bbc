"""Learning who listens at an address: for a peer that was named by its address alone. On an asyncio loop.

A pool keeps its connections by node id, so whoever is known by an address has to be asked first. What is learnt is a
member's word, as everything is that comes after the handshake.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.errors import HandshakeError, MlxcelError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.net.pool.backoff import UNSEEN_AFTER, Backoff
from mlxcel_nb.util.log import get_logger

log = get_logger("net.introduction")

LINK = "introduction"
"""What such a connection says it is for; it ends at once."""


async def introduced(
    dialler: Dialler,
    address: Address,
    *,
    own: Address | None = None,
    on_unseen: Callable[[str, str], object] | None = None,
) -> str | None:
    """The id of the node at `address`, as soon as one answers there; None when it is this node itself.

    Goes on until it is cancelled: a peer may start days later. A peer that cannot be let in is logged once.

    Args:
        own: where this node itself listens.
        on_unseen: told why nobody was reached, once a reason: the address, and the reason.
    """
    backoff, complained = Backoff(), False
    told: set[str] = set()
    while address != own:
        try:
            link = await dialler.dial(address, hello={"link": LINK})
        except MlxcelError as error:
            if " is this node itself" in error.cause:
                return None
            if isinstance(error, HandshakeError) and not complained:
                log.warning("%s", error)
                complained = True
            if not isinstance(error, HandshakeError) and backoff.failed >= UNSEEN_AFTER and error.cause not in told:
                told.add(error.cause)
                if on_unseen is not None:
                    on_unseen(str(address), error.cause)
            await asyncio.sleep(backoff.next_s() or 0.0)
            continue
        ControlLink(link, on_frame=_drop, on_state=_drop).close("introduced")
        return link.peer.node_id
    return None


def _drop(*_: object) -> None:
    """Nothing is wanted of this connection but the peer's id."""
