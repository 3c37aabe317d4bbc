"""The links of one model instance: every two members that talk to each other open a pair of them. On the node's loop.

The lower member dials, the other waits for what arrives. It is all or nothing: when one link cannot be had, or the
gathering is cancelled, whatever was opened is closed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mlxcel_nb.cluster.address import parse_address
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.cluster.shape import Shapes
from mlxcel_nb.net.dial import dial
from mlxcel_nb.net.link import Link
from mlxcel_nb.runtime.protocol import LoadOrder
from mlxcel_nb.runtime.rendezvous import Rendezvous
from mlxcel_nb.wire.handshake import Identity

LINKS_S = 20.0
"""For the members of an instance to find each other."""


@dataclass(frozen=True)
class Pair:
    """What leads to one member: the link for tensors, and the one beside it that tells whether the member lives."""

    hot: Link
    witness: Link

    def close(self) -> None:
        self.hot.close()
        self.witness.close()


async def gather_links(
    order: LoadOrder,
    me: int,
    identity: Identity,
    secret: Secret,
    rendezvous: Rendezvous,
    shapes: Shapes | None = None,
    *,
    previous_secret: Secret | None = None,
) -> dict[int, Pair]:
    """The pairs that member `me` of `order` needs, by member index.

    Args:
        shapes: how what is sent to a member is shaped, on the links that this side dials.
        previous_secret: as for `dial`.

    Raises:
        MlxcelError: the first link that could not be had.
    """
    opened: list[Link] = []

    async def one(other: int, kind: str) -> Link:
        peer = order.members[other]
        if me < other:
            hello = {"link": kind, "instance": order.instance}
            address = parse_address(peer.address)
            link = await dial(
                identity,
                secret,
                address,
                expect_node_id=peer.node_id,
                hello=hello,
                previous_secret=previous_secret,
                shapes=shapes,
            )
        else:
            link = await rendezvous.wait((order.instance, peer.node_id, kind), LINKS_S)
        opened.append(link)
        return link

    async def pair(other: int) -> Pair:
        return Pair(await one(other, "hot"), await one(other, "witness"))

    others = [b if a == me else a for a, b in order.layout.edges() if me in (a, b)]
    tasks = [asyncio.ensure_future(pair(other)) for other in others]
    try:
        return dict(zip(others, await asyncio.gather(*tasks), strict=True))
    except BaseException:
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for link in opened:
                link.close()
            rendezvous.drop(order.instance)
        raise
