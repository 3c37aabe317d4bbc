"""Ports that are taken, and names that are hard to look up."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.errors import (
    ConfigError,
    PeerLost,
)
from mlxcel_nb.net.links import resolver, sockets
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.sockets import bind, connect
from tests.hosts import hosts
from tests.net.helpers import (
    SECRET,
    identity,
    listening,
    run,
)


def test_a_busy_port_names_the_process_that_has_it():
    """Case 52."""

    async def case():
        async with listening() as (_, address, _links), listening("second") as (second, _, _more):
            await second.close()
            with pytest.raises(ConfigError, match=f"port {address.port} in use by pid {os.getpid()}"):
                await second.start("127.0.0.1", address.port)
            assert (await second.start()).port != address.port

    run(case())


def test_a_port_range_gives_its_first_free_port():
    async def case():
        async with listening() as (_, address, _links), listening("second") as (second, _, _more):
            await second.close()
            found = await second.start("127.0.0.1", port_range=(address.port, min(65535, address.port + 20)))
            assert address.port < found.port <= address.port + 20
            await second.close()
            with pytest.raises(ConfigError, match="in use"):
                await second.start("127.0.0.1", port_range=(address.port, address.port))
            with pytest.raises(ConfigError, match=r"not an address|cannot listen"):
                await second.start("192.0.2.77")

    run(case())


def test_a_look_up_that_fails_once_is_asked_again(monkeypatch):
    """Case 48."""

    async def case():
        async with listening() as (_, address, _links):
            real, failed = resolver.resolve, set()

            def flaky(host, port, family):
                if family not in failed:
                    failed.add(family)
                    raise socket.gaierror(socket.EAI_AGAIN, "try again")
                return real("127.0.0.1", port, family)

            monkeypatch.setattr(resolver, "resolve", flaky)
            (await dial(identity("client"), SECRET, Address("somewhere.test", address.port))).close()

    run(case())


def test_a_family_that_answers_late_holds_nobody_up(monkeypatch):
    """Case 48."""

    async def case():
        async with listening() as (_, address, _links):
            real, slow = resolver.resolve, asyncio.Event()
            loop = asyncio.get_running_loop()

            def half(host, port, family):
                if family == socket.AF_INET6:
                    asyncio.run_coroutine_threadsafe(slow.wait(), loop).result()
                return real("127.0.0.1", port, socket.AF_INET)

            monkeypatch.setattr(resolver, "resolve", half)
            (await dial(identity("client"), SECRET, Address("somewhere.test", address.port))).close()
            slow.set()  # only now does it answer

    run(case())


def test_the_second_address_of_a_name_is_tried_when_the_first_refuses(monkeypatch):
    """Case 48."""

    async def case():
        async with listening() as (_, address, _links):
            with socket.create_server(("127.0.0.1", 0)) as gone:
                dead = gone.getsockname()[1]

            def two(host, port, family):
                if family == socket.AF_INET6:
                    raise socket.gaierror(socket.EAI_NONAME, "no such name")
                return [(family, ("127.0.0.1", dead)), (family, ("127.0.0.1", port))]

            monkeypatch.setattr(resolver, "resolve", two)
            (await dial(identity("client"), SECRET, Address("somewhere.test", address.port))).close()

    run(case())


def test_an_unknown_name_is_offline_with_the_reason(monkeypatch):
    def unknown(host, port, family):
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(resolver, "resolve", unknown)
    with pytest.raises(PeerLost, match="not known"):
        run(dial(identity("client"), SECRET, Address("nowhere.test", 9000)))


@pytest.mark.parametrize(
    ("number", "cause", "mend"),
    [
        (errno.ECONNREFUSED, "connection refused", "the port is right"),
        (errno.ENETUNREACH, "network unreachable", "interfaces, cables and Wi-Fi"),
        (errno.EHOSTUNREACH, "no route to the host", "interfaces, cables and Wi-Fi"),
        (errno.ETIMEDOUT, "no answer", "firewall"),
    ],
)
def test_what_to_look_at_fits_the_way_in_which_nobody_was_reached(monkeypatch, number, cause, mend):
    async def fails(*_):
        raise OSError(number, "as the system says it")

    monkeypatch.setattr(sockets, "_attempt_from", fails)
    with pytest.raises(PeerLost, match=f"is offline: {cause}") as caught:
        run(dial(identity("client"), SECRET, Address("127.0.0.1", 9000)))
    assert mend in str(caught.value)


def test_silence_is_no_matter_of_the_port(monkeypatch):
    async def nothing(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(sockets, "_attempt_from", nothing)
    with pytest.raises(PeerLost, match="is offline: no answer within") as caught:
        run(dial(identity("client"), SECRET, Address("127.0.0.1", 9000), deadline=0.05))
    assert "firewall" in str(caught.value)


def test_a_host_name_may_be_listened_on():
    async def case():
        async with listening() as (listener, _, _links):
            await listener.close()
            address = await listener.start("localhost")
            (await dial(identity("client"), SECRET, address)).close()

    run(case())


def test_a_connection_comes_from_the_source_it_was_given_where_that_is_of_use():
    """Else from where the system has it come: another family, another host's address, no way back."""

    async def case(target: Address, source: str) -> str:
        with await connect(target, source=source) as sock:
            return str(sock.getsockname()[0])

    with hosts(2, links=("eth0", "eth1")) as (a, b):
        with b.inside():
            taken = bind(b.addresses["eth1"], 0)
        target = Address(b.addresses["eth1"], taken.getsockname()[1])
        with taken, a.inside():
            assert asyncio.run(case(target, a.addresses["eth0"])) == a.addresses["eth0"]
            for useless in ("", "127.0.0.1", "0.0.0.0", "10.99.0.1", a.address6):
                assert asyncio.run(case(target, useless)) == a.addresses["eth1"], useless
            a.cut("eth0")
            assert asyncio.run(case(target, a.addresses["eth0"])) == a.addresses["eth1"]


def test_an_address_of_another_host_is_named_with_those_there_are():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this host. It has .*127\.0\.0\.1"):
        bind("192.0.2.1", 0)
