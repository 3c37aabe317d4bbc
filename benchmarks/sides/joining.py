"""How the processes of one side find each other: addresses and a secret come over standard input."""

from __future__ import annotations

import asyncio
import json
import sys
from functools import partial
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.hot.hot_link import MAX_SPIN_S, HotLink
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.net.shared_memory.offer import SharedMemoryOffer
from mlxcel_nb.wire.handshake import Identity


def hot_links(rank: int, size: int, *, spin: bool, shared_memory: bool = False) -> dict[int, HotLink]:
    """A hot link to every other rank, by rank: the lower ones are dialled, the higher ones arrive.

    Args:
        shared_memory: move them there, as engines on one host do.
    """
    spin_s = MAX_SPIN_S if spin else 0.0
    links = {other: HotLink(link, spin_s=spin_s) for other, link in plain_links(rank, size).items()}
    for _, link in sorted(links.items()):
        if shared_memory and (reason := agree(link, partial(SharedMemoryOffer, link.link))):
            raise SystemExit(f"no shared memory: {reason}")
    return links


def plain_links(rank: int, size: int) -> dict[int, Link]:
    """The same, for another driver."""
    return asyncio.run(_join(rank, size))


async def _join(rank: int, size: int) -> dict[int, Link]:
    loop = asyncio.get_running_loop()
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    secret = Secret(bytes.fromhex(told["secret"]))
    me = Identity(cluster="benchmark", node_id=f"rank-{rank}", role="worker", incarnation=new_incarnation())
    arrived: asyncio.Queue[Link] = asyncio.Queue()
    listener = Listener(me, [secret], on_link=arrived.put_nowait)
    print(json.dumps({"port": (await listener.start()).port}), flush=True)
    ports: list[int] = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    links = {
        other: await dial(me, secret, Address("127.0.0.1", ports[other]), expect_node_id=f"rank-{other}")
        for other in range(rank)
    }
    while len(links) < size - 1:
        link = await arrived.get()
        links[int(link.peer.node_id.removeprefix("rank-"))] = link
    await listener.close()
    return links
