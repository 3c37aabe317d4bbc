"""The links of an instance are opened all or not at all, and a load that is not wanted any more lets go of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.errors import HandshakeError, PeerLost
from mlxcel_nb.runtime import gathering
from mlxcel_nb.runtime.gathering import gather_links
from mlxcel_nb.runtime.node import Node
from mlxcel_nb.runtime.protocol import LoadOrder, Member
from mlxcel_nb.runtime.rendezvous import Rendezvous
from tests.net.helpers import Heard, dialler, link_pair, listening, read_all, run
from tests.runtime.nodes import answer, linked, running
from tests.tiny import make_tiny

NOBODY = "127.0.0.1:1"


def order(*members: tuple[str, str], model: str = "unread") -> LoadOrder:
    return LoadOrder(
        id="load-1",
        instance="instance-1",
        model=model,
        layout=make_layout(5, pp=len(members)),
        members=tuple(Member(node_id=node_id, address=address) for node_id, address in members),
        dtype="auto",
        step_s=10.0,
    )


def test_when_one_member_cannot_be_reached_the_links_to_the_others_are_closed() -> None:
    async def case() -> None:
        async with listening("n1") as (_, address, arrived):

            async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while arrived.qsize() < 2:
                    await asyncio.sleep(0.01)
                writer.close()

            async with await asyncio.start_server(refuse, "127.0.0.1") as server:
                other = "{}:{}".format(*server.sockets[0].getsockname())
                wanted = order(("n0", NOBODY), ("n1", str(address)), ("n2", other))
                with pytest.raises(HandshakeError, match=f"host {other}"):
                    await gather_links(wanted, 0, dialler("n0"), Rendezvous())
            for _ in ("hot", "witness"):
                assert await read_all((await arrived.get()).sock) == b""

    run(case())


def test_a_member_that_opens_only_one_of_its_links_is_named_and_that_one_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "LINKS_S", 0.1)

    async def case() -> None:
        async with link_pair() as (theirs, ours):
            rendezvous = Rendezvous()
            rendezvous.arrived(("instance-1", "n0", "hot"), ours)
            with pytest.raises(PeerLost, match=r"n0: did not open its witness link within 0\.1 s"):
                await gather_links(order(("n0", NOBODY), ("n1", NOBODY)), 1, dialler("n1"), rendezvous)
            assert await read_all(theirs.sock) == b""
            assert rendezvous._futures == {}

    run(case())


@pytest.mark.parametrize("asked", [True, False], ids=["while it is waited for", "before it is asked for"])
def test_a_cancelled_gathering_closes_what_has_arrived(asked: bool) -> None:
    async def case() -> None:
        async with link_pair() as (theirs, ours):
            rendezvous = Rendezvous()
            wanted = order(("n0", NOBODY), ("n1", NOBODY))
            gathered = asyncio.ensure_future(gather_links(wanted, 1, dialler("n1"), rendezvous))
            await asyncio.sleep(0)
            # A witness comes before the hot link: nobody has asked for it yet.
            rendezvous.arrived(("instance-1", "n0", "hot" if asked else "witness"), ours)
            gathered.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gathered
            assert await read_all(theirs.sock) == b""
            assert rendezvous._futures == {}

    run(case())


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running("n1") as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


def router(node: Node, name: str = "router-00000001") -> contextlib.AbstractAsyncContextManager[Heard]:
    return linked(node, name, "router")


async def loads_alone(heard: Heard, tiny: Path) -> None:
    """The node is free, or soon: it takes a model of its own, and gives it back.

    What a router that has left had said before may be heard only now, so a node may yet become busy and free again.
    """
    alone = order(("n1", NOBODY), model=str(tiny))
    async with asyncio.timeout(15):
        while (reply := await answer(heard, alone.to_dict()))["type"] == "error":
            assert reply["error"]["cause"] == "holds unread already"
            await asyncio.sleep(0.05)  # the pace of the tries
    assert reply["type"] == "loaded"
    assert (await answer(heard, {"type": "unload", "id": "u"}))["type"] == "reply"


@pytest.mark.parametrize("patience", [0.0, 0.1], ids=["in the same breath", "later"])
def test_an_unload_ends_the_wait_for_a_member_that_never_opens_its_links(
    node: Node, tiny: Path, patience: float
) -> None:
    async def case() -> None:
        async with router(node) as heard:
            heard.link.send(order(("n0", NOBODY), ("n1", NOBODY)).to_dict())
            if patience:
                await answer(heard, {"type": "status", "id": "s"})
            began = time.monotonic()
            first = await answer(heard, {"type": "unload", "id": "u"})
            replies = {message["id"]: message for message in (first, await heard.messages.get())}
            assert time.monotonic() - began < 8
            assert replies["load-1"]["error"]["code"] == "cancelled" and replies["u"]["type"] == "reply"
            await loads_alone(heard, tiny)

    run(case())


@pytest.mark.parametrize("patience", [0.0, 0.1], ids=["in the same breath", "later"])
def test_a_router_that_leaves_while_links_are_awaited_leaves_the_node_free(
    node: Node, tiny: Path, patience: float
) -> None:
    async def case() -> None:
        async with router(node) as first:
            first.link.send(order(("n0", NOBODY), ("n1", NOBODY)).to_dict())
            if patience:
                await answer(first, {"type": "status", "id": "s"})
        async with router(node, "router-00000002") as second:
            async with asyncio.timeout(15):
                while node._holding.order is not None:
                    await answer(second, {"type": "status", "id": "s"})
            await loads_alone(second, tiny)

    run(case())
