"""Whom discovery makes a peer, and when it is forgotten again."""

from __future__ import annotations

import asyncio

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import Change as StateChange
from mlxcel_nb.cluster.membership import Membership, Signal, State
from mlxcel_nb.cluster.places import Interface
from mlxcel_nb.cluster.transports import HostFacts
from mlxcel_nb.net.discovery.beacons import Announcement
from mlxcel_nb.net.discovery.sightings import Change, Event, Heard, Sighting
from mlxcel_nb.runtime import finding as module
from mlxcel_nb.runtime.finding import MAX_DIALLED, Finding
from mlxcel_nb.runtime.surroundings import Surroundings
from tests.net.helpers import SECRET

HERE, THERE = Address("10.0.0.2", 9000), Address("10.0.0.2", 9001)


class Book:
    """The part of a pool that discovery uses: what it was told to keep."""

    def __init__(self) -> None:
        self.peers: dict[str, tuple[Address, ...]] = {}
        self.membership = Membership(0.0)

    def add(self, node_id: str, addresses: list[Address]) -> None:
        self.peers[node_id] = tuple(addresses)
        self.membership.expect([node_id], 0.0)

    def remove(self, node_id: str) -> None:
        del self.peers[node_id]
        self.membership.forget(node_id)


def made(static: dict[str, list[Address]] | None = None, facts: HostFacts | None = None) -> tuple[Finding, Book]:
    book = Book()
    me = Announcement(node_id="me", role="hybrid", incarnation=bytes(16), listens=HERE)
    surroundings = Surroundings("me")
    surroundings.facts = facts
    return Finding(book, "c", [SECRET], me, static or {}, surroundings), book  # type: ignore[arg-type]


def node(node_id: str = "b", *addresses: Address) -> Sighting:
    return Sighting(
        node_id=node_id, role="hybrid", incarnation=b"b" * 16, addresses=addresses or (HERE,),
        paths=(Heard("eth0", "IPv6"),), clock_s=0.0, first=0.0, last=0.0,
    )  # fmt: skip


def heard(finding: Finding, event: Event, sighting: Sighting) -> None:
    finding._heard(Change(event, sighting))


def test_whoever_is_found_becomes_a_peer_and_moves_with_its_addresses() -> None:
    finding, book = made()
    heard(finding, Event.FOUND, node())
    assert book.peers == {"b": (HERE,)}
    heard(finding, Event.CHANGED, node("b", THERE, HERE))
    assert book.peers == {"b": (THERE, HERE)}


def test_a_configured_address_comes_first_and_a_configured_peer_stays() -> None:
    finding, book = made({"b": [THERE], "c": []})
    book.add("b", [THERE])
    heard(finding, Event.FOUND, node("b", HERE, THERE))
    assert book.peers["b"] == (THERE, HERE)
    heard(finding, Event.GONE, node("b"))
    assert "b" in book.peers


def test_one_that_listens_nowhere_or_bears_this_node_s_name_is_no_peer() -> None:
    finding, book = made()
    visitor = Sighting(**{**vars(node("ping-1")), "addresses": ()})
    heard(finding, Event.FOUND, visitor)
    heard(finding, Event.FOUND, node("me"))
    assert not book.peers


def test_endless_names_and_addresses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FOUND", 5)
    finding, book = made()
    for number in range(9):
        heard(finding, Event.FOUND, node(f"n{number}", *(Address("10.0.0.9", 1 + k) for k in range(12))))
    assert len(book.peers) == 5
    assert all(len(addresses) == MAX_DIALLED for addresses in book.peers.values())


def test_silence_forgets_a_peer_that_was_never_reached_but_not_one_whose_connection_stands() -> None:
    finding, book = made()
    heard(finding, Event.FOUND, node())
    heard(finding, Event.GONE, node())
    assert not book.peers
    heard(finding, Event.FOUND, node())
    book.membership.members["b"].state = State.ALIVE
    heard(finding, Event.GONE, node())
    assert "b" in book.peers


def test_a_found_peer_that_dies_in_silence_is_forgotten_when_its_death_is_known() -> None:
    async def body() -> None:
        finding, book = made({"c": [HERE]})
        for name in ("b", "c"):
            heard(finding, Event.FOUND, node(name))
            book.membership.members[name].state = State.DEAD
            dead = StateChange(
                node_id=name, state=State.DEAD, before=State.ALIVE, signal=Signal.SILENT, reason="", at=1.0
            )
            finding.state_changed(dead)
        assert book.peers.keys() == {"b", "c"}, "the pool is still telling"
        await asyncio.sleep(0)
        assert book.peers.keys() == {"c"}, "the configured one stays"

    asyncio.run(body())


def test_what_is_heard_on_a_better_interface_is_dialled_first() -> None:
    kinds = (("en0", "wifi"), ("bridge0", "thunderbolt"))
    finding, _ = made(
        facts=HostFacts(system="Darwin", interfaces=tuple(Interface(name=name, kind=kind) for name, kind in kinds))
    )
    assert finding._prefer("bridge0") < finding._prefer("eth9") < finding._prefer("en0")
