"""Two ends over loopback: dialling, admission, control messages, and how links end."""

from __future__ import annotations

import asyncio

import pytest
from mlxcel_nb.cluster.secret import random_secret
from mlxcel_nb.net.aio import ControlLink
from mlxcel_nb.net.dial import dial
from mlxcel_nb.net.listener import Listener
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.wire.handshake import Identity


def ident(node_id, **kw):
    return Identity(cluster="c", node_id=node_id, role="worker", incarnation=new_incarnation(), **kw)


async def _quick():
    secret = random_secret()
    got = asyncio.Queue()
    lst = Listener(ident("server"), [secret], on_link=got.put)
    addr = await lst.start()
    link = await dial(ident("client"), secret, addr, hello={"link": "x"})
    other = await got.get()
    print(link.peer, other.peer)
    q = asyncio.Queue()
    s = asyncio.Queue()
    a = ControlLink(
        link,
        on_message=lambda l, m: q.put_nowait(m),
        on_stream=lambda l, m: s.put_nowait(m),
        on_state=lambda *x: print("a", x),
    )
    b = ControlLink(
        other,
        on_message=lambda l, m: q.put_nowait(m),
        on_stream=lambda l, m: s.put_nowait(m),
        on_state=lambda *x: print("b", x),
    )
    a.send({"hi": 1})
    print(await q.get())
    for i in range(500):
        b.send_stream({"n": i})
    for i in range(500):
        assert (await s.get())["n"] == i
    print(await a.ping(b"x" * 1000000), a.info())
    a.close("bye")
    await asyncio.sleep(0.05)
    print(b.state, b.reason, len(lst.admission))
    await lst.close()


def test_quick():
    asyncio.run(_quick())
