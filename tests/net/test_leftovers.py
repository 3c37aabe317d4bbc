"""A link that has ended is freed at once, with all its buffers, and does not wait for the garbage collector.

Where links come and go, what waits for the collector is what memory grows by.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from tests.net.helpers import SECRET, Heard, detached_pairs, identity, run


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive(refs: list[weakref.ref[Any]]) -> list[Any]:
    return [ref() for ref in refs if ref() is not None]


@pytest.mark.parametrize("end", ["goodbye", "reset"])
def test_control_links_are_freed(end: str) -> None:
    async def both_ends() -> list[weakref.ref[Any]]:
        links: asyncio.Queue[Link] = asyncio.Queue()
        listener = Listener(identity("server"), [SECRET], on_link=links.put_nowait)
        address = await listener.start()
        ours, theirs = Heard(await dial(identity("client"), SECRET, address)), Heard(await links.get())
        await ours.link.ping(b"x" * 100_000)
        refs = [weakref.ref(thing) for heard in (ours, theirs) for thing in (heard.link, heard.link.link)]
        if end == "goodbye":
            ours.link.close("enough")
        else:
            ours.link.link.hang_up()
            await ours.states.get()
        await theirs.states.get()
        await listener.close()
        await asyncio.sleep(0)
        return refs

    refs = run(both_ends())
    assert not alive(refs)


@pytest.mark.parametrize("end", ["goodbye", "reset"])
def test_hot_links_are_freed(end: str) -> None:
    def both_ends() -> list[weakref.ref[Any]]:
        ((ours, theirs),) = detached_pairs()
        here, there = HotLink(ours), HotLink(theirs)
        here.send_tensor(Tag(1, 1, 1), "uint8", (100_000,), bytes(100_000))
        there.recv_tensor(Tag(1, 1, 1))
        if end == "goodbye":
            here.close("enough")
        else:
            ours.hang_up()
        with contextlib.suppress(PeerLost):
            there.recv_control()
        here.close()
        there.close()
        return [weakref.ref(thing) for link in (here, there) for thing in (link, link.link)]

    refs = both_ends()
    assert not alive(refs)
