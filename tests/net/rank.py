"""One rank of a stage as a process of its own; `test_rank_processes` starts it and reads its lines.

    python -m tests.net.rank RANK SIZE PATIENCE END

Reads the secret and the peers' ports from standard input, joins the others, and exchanges buffers until something
ends it. END is what this rank does by itself after 50 exchanges: nothing, "close", or "reset".
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.collectives.group import Group, Tag
from mlxcel_nb.net.hot.hot_link import HotLink, Interrupt
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.wire.handshake import Identity

RESET_AFTER = 50


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def join(rank: int, size: int) -> dict[int, Link]:
    """A link to every other rank: the lower ones are dialled, the higher ones arrive."""
    loop = asyncio.get_running_loop()
    secret = Secret(bytes.fromhex(sys.stdin.readline().strip()))
    me = Identity(cluster="ranks", node_id=f"rank-{rank}", role="worker", incarnation=new_incarnation())
    arrived: asyncio.Queue[Link] = asyncio.Queue()
    listener = Listener(me, [secret], on_link=arrived.put)
    tell(port=(await listener.start()).port)
    ports = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    links = {
        other: await dial(me, secret, Address("127.0.0.1", ports[other]), expect_node_id=f"rank-{other}")
        for other in range(rank)
    }
    while len(links) < size - 1:
        link = await arrived.get()
        links[int(link.peer.node_id.removeprefix("rank-"))] = link
    await listener.close()
    return links


def main(rank: int, size: int, patience_s: float, end: str) -> None:
    links = {other: HotLink(link) for other, link in asyncio.run(join(rank, size)).items()}
    interrupt = Interrupt()
    group = Group(rank, links, interrupt)
    step, own = 0, bytes([rank]) * 20_000
    while True:
        began, used = time.monotonic(), time.process_time()
        try:
            parts = group.all_gather(Tag(1, step, 1), own, deadline=began + patience_s)
        except MlxcelError as error:
            waited = time.monotonic() - began
            busy = (time.process_time() - used) / max(waited, 1e-9)
            tell(error=error.code, node=error.node, text=str(error), waited_s=waited, busy=busy, step=step)
            # The last rank is the one that ends; a time-out may name the survivor whom it holds up.
            links.pop(size - 1).close()
            break
        assert [part[0] for part in parts] == list(range(size))
        step += 1
        if step % 25 == 0:
            tell(step=step)
        if step == RESET_AFTER and end == "close":
            for link in links.values():
                link.close("rank leaves")
            return
        if step == RESET_AFTER and end == "reset":
            for link in links.values():
                link.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                link.link.close()
            return
    # The survivors go on without the one that is lost.
    (other,) = links
    again = Group(int(rank > other), {int(other > rank): links[other]}, interrupt)
    parts = again.all_gather(Tag(2, 1, 1), own, deadline=time.monotonic() + 10)
    tell(again=[part[0] for part in parts])
    for link in links.values():
        link.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
