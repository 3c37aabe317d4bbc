"""Nodes that the configuration knows by name are bound to where the name leads, looked up off the loop."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from mlxcel_nb.errors import Refused
from mlxcel_nb.net.links import known_names
from mlxcel_nb.net.links.dial import dial
from tests.net.helpers import SECRET, identity, listening, run

HERE, ELSEWHERE = "127.0.0.1", "192.0.2.7"


class Zone:
    """What names lead to, in place of the system's resolver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
        self.names = {f"{name}.test": ip for name, ip in names.items()}
        self.asked = 0
        self.answers = threading.Event()
        """Until it is set, nobody hears anything."""
        self.answers.set()
        self.threads: set[str] = set()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host, port, family=0, **more):
        if not str(host).endswith(".test"):
            return self._real(host, port, family=family, **more)
        self.asked += 1
        self.threads.add(threading.current_thread().name)
        assert self.answers.wait(20)
        if family == socket.AF_INET6 or host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.names[host], port))]


def test_a_node_may_come_from_where_its_name_leads_and_from_nowhere_else(monkeypatch):
    zone = Zone(monkeypatch, mac1=HERE, mac2=ELSEWHERE)

    async def case():
        async with listening(configured={"one": ["mac1.test"], "two": ["mac2.test"]}) as (_, address, _links):
            (await dial(identity("one"), SECRET, address)).close()
            with pytest.raises(Refused, match=r"two is configured at mac2\.test, not at 127\.0\.0\.1"):
                await dial(identity("two"), SECRET, address)
            assert "MainThread" not in zone.threads

    run(case())


def test_names_and_addresses_of_one_node_go_together(monkeypatch):
    Zone(monkeypatch, mac1=ELSEWHERE)

    async def case():
        async with listening(configured={"one": ["mac1.test", HERE]}) as (_, address, _links):
            (await dial(identity("one"), SECRET, address)).close()

    run(case())


def test_a_name_that_leads_here_by_now_is_learned_when_its_node_comes(monkeypatch):
    monkeypatch.setattr(known_names, "FRESH_S", 0.0)
    zone = Zone(monkeypatch, mac1=ELSEWHERE)

    async def case():
        async with listening(configured={"one": ["mac1.test"]}) as (_, address, _links):
            with pytest.raises(Refused):
                await dial(identity("one"), SECRET, address)
            zone.names["mac1.test"] = HERE
            (await dial(identity("one"), SECRET, address)).close()

    run(case())


def test_one_that_knocks_often_does_not_make_us_ask_often(monkeypatch):
    zone = Zone(monkeypatch, mac1=ELSEWHERE)

    async def case():
        async with listening(configured={"one": ["mac1.test"]}) as (_, address, _links):
            for _ in range(5):
                with pytest.raises(Refused):
                    await dial(identity("one"), SECRET, address)
            assert zone.asked <= 4, "two families, at the start and perhaps once more"

    run(case())


def test_a_slow_resolver_holds_up_that_one_verdict_alone(monkeypatch):
    """Case 48: the loop goes on meanwhile."""
    zone = Zone(monkeypatch, mac1=HERE)
    zone.answers.clear()

    async def case():
        async with listening(configured={"one": ["mac1.test"]}) as (_, address, _links):
            waiting = asyncio.ensure_future(dial(identity("one"), SECRET, address))
            (await dial(identity("other"), SECRET, address)).close()
            assert not waiting.done()
            zone.answers.set()
            (await waiting).close()

    run(case())


def test_a_name_that_leads_nowhere_is_no_hole(monkeypatch):
    Zone(monkeypatch)

    async def case():
        async with listening(configured={"one": ["unknown.test"]}) as (_, address, _links):
            with pytest.raises(Refused, match=r"unknown\.test"):
                await dial(identity("one"), SECRET, address)

    run(case())
