"""The links of one model instance: every two members that talk to each other open a pair of them. On the node's loop.

The lower member dials, the other waits for what arrives. The ways to try are in the load order, the same for all: when
one leads nowhere the next is taken, and the link says why. It is all or nothing: when one link cannot be had, or the
gathering is cancelled, whatever was opened is closed.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mlxcel_nb.cluster.paths import TITLES, Path
from mlxcel_nb.errors import MlxcelError, Refused
from mlxcel_nb.net.links.addresses import normal_ip
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.net.links.link import Link, local_address
from mlxcel_nb.runtime.protocol import LoadOrder
from mlxcel_nb.runtime.rendezvous import Rendezvous
from mlxcel_nb.util import times

LINKS_S = 20.0
"""For the members of an instance to find each other."""

WAY_S = 2.5
"""For a way that is not the last: a cut cable says nothing, and there are others to try within `LINKS_S`."""

AGAIN_S = 0.3
"""Until a member that refused is asked again along the same way."""


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
    dialler: Dialler,
    rendezvous: Rendezvous,
) -> dict[int, Pair]:
    """The pairs that member `me` of `order` needs, by member index.

    Args:
        dialler: makes this side's connections; within a network of both ends the system chooses their source.

    Raises:
        MlxcelError: the first link that could not be had.
    """
    opened: list[Link] = []

    async def along(path: Path, other: int, kind: str, patience: float) -> Link:
        link = await dialler.dial(
            path.address,
            expect_node_id=order.members[other].node_id,
            hello={"link": kind, "instance": order.instance},
            deadline=patience,
            source="" if path.source else None,
        )
        opened.append(link)
        link.path, link.why = str(path), path.reason
        return link

    async def arrived(other: int, kind: str) -> Link:
        link = await rendezvous.wait((order.instance, order.members[other].node_id, kind), LINKS_S)
        opened.append(link)
        _describe(link, order.ways(other, me))
        return link

    async def patiently(path: Path, other: int) -> Link:
        """The hot link along one way of several; a member that has not got the order yet may refuse this source."""
        end = asyncio.get_running_loop().time() + WAY_S
        while True:
            left = end - asyncio.get_running_loop().time()
            try:
                return await along(path, other, "hot", left)
            except Refused:
                if left < 2 * AGAIN_S:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def first(other: int) -> tuple[Link, Path]:
        """The hot link, along the first way that leads there; what failed before is among its reasons."""
        *others, last = order.ways(me, other)
        failed: list[str] = []
        for path in others:
            try:
                link = await patiently(path, other)
            except MlxcelError as error:  # refused along this way may be let in along another
                failed.append(f"{path}: {error.cause}")
            else:
                break
        else:
            path = last
            link = await along(path, other, "hot", times.HANDSHAKE_S)
        link.why = "; ".join([*failed, path.reason])
        return link, path

    async def pair(other: int) -> Pair:
        if other < me:
            return Pair(await arrived(other, "hot"), await arrived(other, "witness"))
        hot, path = await first(other)
        witness = await along(path, other, "witness", times.HANDSHAKE_S)
        witness.why = hot.why
        return Pair(hot, witness)

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


def _describe(link: Link, ways: tuple[Path, ...]) -> None:
    """Say of a link that arrived which of the agreed ways it took: the one to the address it came to."""
    here = local_address(link.sock)
    for path in ways:
        if normal_ip(path.address.host).partition("%")[0] == here:
            link.path, link.why = f"{TITLES.get(path.kind, path.kind)} {path.peer_interface}".rstrip(), path.reason
            return
