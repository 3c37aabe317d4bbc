"""The far end of a hot link that agrees on a further path and then sends every tensor back.

python -m tests.net.further_end ucx TRANSPORTS
python -m tests.net.further_end shared-memory

Secret in hexadecimal and port come on standard input, a line each.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from functools import partial

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.collectives.group import Tag
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.shared_memory.offer import SharedMemoryOffer
from mlxcel_nb.net.ucx.offer import UcxOffer
from mlxcel_nb.wire.handshake import Identity


def main(way: str, *more: str) -> None:
    secret = Secret(bytes.fromhex(sys.stdin.readline().strip()))
    address = Address("127.0.0.1", int(sys.stdin.readline()))
    me = Identity(cluster="test", node_id="far", role="worker", incarnation=new_incarnation())
    hot = HotLink(asyncio.run(dial(me, secret, address)))
    agree(hot, partial(UcxOffer, *more) if way == UcxOffer.name else partial(SharedMemoryOffer, hot.link))
    step = 0
    with contextlib.suppress(PeerLost):
        while True:
            tensor = hot.recv_tensor(Tag(1, step, 1), deadline=time.monotonic() + 20)
            copy = bytes(tensor.data)
            hot.send_tensor(Tag(1, step, 2), tensor.dtype, tensor.dims, copy, deadline=time.monotonic() + 20)
            step += 1
    hot.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
