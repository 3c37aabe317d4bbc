"""A witness that breaks off is made once more before its member is called dead."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.runtime.rendezvous import Rendezvous
from mlxcel_nb.runtime.witnesses import Witnesses
from mlxcel_nb.util import times
from tests.net.helpers import SECRET, identity, run
from tests.net.pools import until

NO_LINGER = struct.pack("ii", 1, 0)
"""Closing is a reset."""


class Side:
    """One member: a listener, a rendezvous and its witnesses; keeps what it hears and whom it lost."""

    def __init__(self, node_id: str) -> None:
        self.me = identity(node_id)
        self.heard: list[dict[str, Any]] = []
        self.lost: list[PeerLost] = []
        self.dialled = 0
        self.may_dial = asyncio.Event()
        self.may_dial.set()
        self.rendezvous = Rendezvous()
        self.listener = Listener(lambda: self.me, [SECRET], on_link=self._on_link)
        self.witnesses = Witnesses(
            self.rendezvous, dial=self.dial, drive=self.drive, lost=lambda _, error: self.lost.append(error)
        )
        self.knocks: list[ControlLink] = []

    async def dial(self, node_id: str, address: Address, hello: Mapping[str, Any]) -> Link:
        self.dialled += 1
        await self.may_dial.wait()
        return await dial(self.me, SECRET, address, expect_node_id=node_id, hello=hello)

    def drive(self, link: Link) -> ControlLink:
        return ControlLink(
            link,
            on_message=lambda _, message: self.heard.append(message),
            on_state=lambda link, state, reason: (
                self.witnesses.ended(link, reason) if state in ("dead", "closed") else None
            ),
        )

    def _on_link(self, link: Link) -> None:
        if link.peer.hello.get("link") == "witness":
            self.rendezvous.arrived((str(link.peer.hello["instance"]), link.peer.node_id, "witness"), link)
        else:
            self.knocks.append(self.drive(link))

    def break_off(self) -> None:
        """Its witnesses are reset, as a network does it."""
        for link in self.witnesses.links.values():
            link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            link._sock.shutdown(socket.SHUT_RDWR)


@contextlib.asynccontextmanager
async def members() -> AsyncIterator[tuple[Side, Side]]:
    """The member that dialled and the one that was dialled."""
    lower, higher = Side("n0"), Side("n1")
    addresses = [await side.listener.start() for side in (lower, higher)]
    for side, address in zip((lower, higher), addresses, strict=True):
        side.me = dataclasses.replace(side.me, data_addr=str(address))
    link = await lower.dial("n1", addresses[1], {"link": "witness", "instance": "i"})
    lower.witnesses.open("i", {"n1": link})
    higher.witnesses.open("i", {"n0": await higher.rendezvous.wait(("i", "n0", "witness"), 5)})
    try:
        yield lower, higher
    finally:
        for side in (lower, higher):
            side.witnesses.close("the test is over")
            side.rendezvous.close()
            await side.listener.close()
            for knock in side.knocks:
                knock.close()


@pytest.mark.parametrize("broken", [0, 1], ids=["at the dialling side", "at the other"])
def test_one_that_breaks_off_is_made_again_and_nobody_is_lost(broken: int) -> None:
    async def case() -> None:
        async with members() as sides:
            for _ in range(2):
                before = [side.witnesses.links[other] for side, other in zip(sides, ("n1", "n0"), strict=True)]
                sides[broken].break_off()
                await until(lambda: sides[0].witnesses.links.get("n1") not in (None, before[0]))  # noqa: B023
                await until(lambda: sides[1].witnesses.links.get("n0") not in (None, before[1]))  # noqa: B023
            sides[0].witnesses.tell("n1", {"type": "abort"})
            sides[1].witnesses.tell("n0", {"type": "failed"})
            await until(lambda: sides[0].heard and sides[1].heard)
            assert not sides[0].lost and not sides[1].lost

    run(case())


def test_what_is_said_meanwhile_arrives_afterwards() -> None:
    async def case() -> None:
        async with members() as (lower, higher):
            lower.may_dial.clear()
            higher.break_off()
            await until(lambda: "n1" not in lower.witnesses.links)
            for n in range(3):
                lower.witnesses.tell("n1", {"n": n})
            lower.may_dial.set()
            await until(lambda: len(higher.heard) == 3)
            assert higher.heard == [{"n": 0}, {"n": 1}, {"n": 2}]

    run(case())


@pytest.mark.parametrize("dead", [0, 1], ids=["the dialling side", "the other"])
def test_a_process_that_ended_is_lost_at_once(dead: int) -> None:
    async def case() -> None:
        async with members() as sides:
            gone, left = sides[dead], sides[1 - dead]
            await gone.listener.close()
            began = asyncio.get_running_loop().time()
            gone.witnesses._instance = ""
            for link in gone.witnesses.links.values():
                link.link.close()
                link._loop.remove_reader(link._fd)
                link._timer.cancel()
            gone.witnesses.links = {}
            await until(lambda: left.lost)
            assert asyncio.get_running_loop().time() - began < times.SUSPECT_S
            assert "without a goodbye" in str(left.lost[0]) or "connection lost" in str(left.lost[0])

    run(case())


def test_a_goodbye_needs_no_second_try() -> None:
    async def case() -> None:
        async with members() as (lower, higher):
            dialled = lower.dialled
            higher.witnesses.close("model unloaded")
            await until(lambda: lower.lost)
            assert (lower.lost[0].cause, lower.dialled) == ("model unloaded", dialled)

    run(case())


@pytest.mark.parametrize("broken", [0, 1], ids=["the other", "the dialling side"])
def test_a_restarted_process_at_the_same_address_is_not_the_same_member(broken: int) -> None:
    async def case() -> None:
        async with members() as sides:
            sides[broken].me = identity(f"n{broken}")
            sides[1 - broken].break_off()
            await until(lambda: sides[1 - broken].lost)

    run(case())


def test_a_peer_that_never_makes_it_again_is_lost_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "SUSPECT_S", 0.5)

    async def case() -> None:
        async with members() as (lower, higher):
            monkeypatch.setattr(lower.witnesses, "ended", lambda *_: None)
            higher.break_off()
            await until(lambda: higher.lost)
            assert lower.knocks, "it was not asked whether it is there"

    run(case())
