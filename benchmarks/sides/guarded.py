"""`python -m benchmarks.sides.guarded HOST`: a listener to be flooded, and what it says of itself when asked.

The secret comes first, as a line of hexadecimal on standard input. Then each line is a question: `facts` is answered
with a JSON object, `end` ends it well. Peers' pings are answered; what else they send is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
from typing import Any

import psutil

from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.wire.handshake import Identity

CLUSTER = "guarded"


FILES = 4096
"""Open files that a flood takes, with some to spare."""


def raise_limit() -> None:
    """Let this process open `FILES` files.

    Raises:
        OSError: the system allows fewer, and this user may not raise that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, max(FILES, hard)))


def own_facts() -> dict[str, int]:
    """Open descriptors and resident bytes of this process."""
    process = psutil.Process()
    return {"fds": process.num_fds(), "rss": process.memory_info().rss}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


async def serve(host: str) -> None:
    loop = asyncio.get_running_loop()
    secret = Secret(bytes.fromhex((await loop.run_in_executor(None, sys.stdin.readline)).strip()))
    links: dict[ControlLink, str] = {}
    states: list[str] = []

    def heard(link: ControlLink, state: str, reason: str) -> None:
        states.append(f"{link.peer.node_id}: {state}: {reason}")
        if not link.open:
            links.pop(link, None)

    def take(link: Link) -> None:
        control = ControlLink(link, on_state=heard, on_frame=lambda *_: None)
        links[control] = link.peer.node_id

    identity = Identity(cluster=CLUSTER, node_id="guarded", role="listener", incarnation=new_incarnation())
    listener = Listener(identity, [secret], on_link=take)
    address = await listener.start(host)
    say(port=address.port)
    while (line := (await loop.run_in_executor(None, sys.stdin.readline)).strip()) == "facts":
        say(
            **own_facts(),
            pending=listener.pending,
            admitted=len(listener.admission),
            links=sorted(links.values()),
            counts=dict(listener.counts),
            states=states,
        )
    await listener.close()
    for link in list(links):
        link.close("the listener ends")
    say(ended=line)


if __name__ == "__main__":
    raise_limit()
    logging.getLogger("mlxcel_nb").setLevel(logging.ERROR)  # of strangers there will be many
    asyncio.run(serve(sys.argv[1]))
