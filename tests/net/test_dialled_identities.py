"""A peer that this node has dialled holds its id and its address as firmly as one that has dialled this node."""

from __future__ import annotations

import pytest

from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.errors import Refused
from mlxcel_nb.net.links.admission import Admission
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.util import times
from mlxcel_nb.wire.hello import VerdictCode
from tests.net.helpers import SECRET, identity, run
from tests.net.pools import Party, party, until


async def joined(c: Party, a: Party) -> None:
    """`c` dials `a`, which has never heard of it."""
    c.pool.add("a", [a.address])
    await until(lambda: len(c.links("a")) == 1 and c.links("a")[0].link.dialled)


async def knock(c: Party) -> None:
    """Another process comes to `c` as "a"."""
    rival = identity("a", incarnation=new_incarnation())
    dialler = Dialler(identity=lambda: rival, secrets=Secrets(SECRET))
    link = await dialler.dial(c.address, hello={"link": "peer"})
    link.close()


def test_nobody_takes_the_place_of_a_node_that_was_dialled_and_lives():
    async def case():
        async with party("a") as a, party("c") as c:
            await joined(c, a)
            with pytest.raises(Refused, match=r"already has a live node 'a' of another incarnation"):
                await knock(c)
            there, (holder,) = c.links("a")[0].peer, c.listener.admission.holding("a")
            assert await c.ask("a") == "a" and len(c.links("a")) == 1
            assert c.state("a").shown == "alive"
            elsewhere = c.listener.admission.ask("a", there.incarnation, "203.0.113.7")
            assert elsewhere.verdict is VerdictCode.IDENTITY and "known at 127.0.0.1" in elsewhere.detail
            assert c.listener.admission.holding("a") == {holder}

    run(case())


def test_a_rival_that_is_dialled_does_not_take_the_place_of_one_that_lives():
    async def case():
        async with party("a") as a, party("a") as rival, party("c") as c:
            await joined(c, a)
            held = c.links("a")[0]
            c.pool.add("a", [rival.address])
            with pytest.raises(Refused, match=r"whoever answers as a at .* is not taken for it"):
                await c.pool._attempt(c.pool._peers["a"])
            assert c.links("a") == [held]
            assert await c.ask("a") == "a" and a.asked == 1 and rival.asked == 0

    run(case())


def test_a_node_that_was_dialled_and_no_longer_answers_gives_way(monkeypatch):
    monkeypatch.setattr(times, "PROBE_S", 0.2)

    async def case():
        async with party("a") as a, party("c") as c:
            await joined(c, a)
            await until(lambda: len(a.guests) == 1)
            frozen = a.guests[0]
            frozen._loop.remove_reader(frozen._fd)
            frozen._timer.cancel()
            await knock(c)

    run(case())


def test_its_id_is_free_once_its_last_connection_is_gone():
    async def case():
        async with party("a") as a, party("c") as c:
            await joined(c, a)
            c.pool.remove("a")
            await until(lambda: not c.listener.admission.holding("a"))
            await knock(c)

    run(case())


def test_connections_that_were_dialled_take_nobody_s_room():
    admission: Admission[str] = Admission(limit=1)
    admission.enter("ours", "a", b"\1" * 16, "203.0.113.1", dialled=True)
    assert not len(admission)
    assert admission.ask("b", b"\2" * 16, "203.0.113.2").verdict is VerdictCode.ACCEPTED
    admission.enter("theirs", "b", b"\2" * 16, "203.0.113.2")
    assert admission.ask("c", b"\3" * 16, "203.0.113.3").verdict is VerdictCode.CAPACITY
