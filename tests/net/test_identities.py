"""One id is one process at one address: what the listener makes of a newcomer."""

from __future__ import annotations

import pytest

from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.errors import (
    HandshakeError,
    Refused,
)
from mlxcel_nb.net.dial import dial
from mlxcel_nb.util import times
from tests.net.helpers import (
    SECRET,
    Heard,
    identity,
    listening,
    run,
)


def test_one_process_may_hold_several_connections():
    async def case():
        async with listening() as (listener, address, _links):
            who = identity("client")
            first, second = await dial(who, SECRET, address), await dial(who, SECRET, address)
            assert len(listener.admission) == 2
            first.close()
            second.close()

    run(case())


def test_another_process_of_the_same_id_is_refused_while_the_first_lives():
    async def case():
        async with listening() as (_, address, links):
            first = Heard(await dial(identity("client"), SECRET, address))
            holder = Heard(await links.get())
            with pytest.raises(Refused, match="another"):
                await dial(identity("client"), SECRET, address)
            assert first.link.open
            first.link.close()
            holder.link.close()

    run(case())


def test_a_holder_that_no_longer_answers_gives_way_after_a_second(monkeypatch):
    monkeypatch.setattr(times, "PING_S", 0.2)

    async def case():
        async with listening() as (listener, address, links):
            frozen = await dial(identity("client"), SECRET, address)  # nobody drives it: no pong
            holder = Heard(await links.get())
            newcomer = await dial(identity("client"), SECRET, address)
            state, _ = await holder.states.get()
            assert state == "dead"
            assert len(listener.admission) == 1
            frozen.close()
            newcomer.close()

    run(case())


def test_an_id_is_free_when_its_connection_has_ended():
    async def case():
        async with listening() as (_, address, links):
            first = Heard(await dial(identity("client"), SECRET, address))
            holder = Heard(await links.get())
            first.link.close("done")
            assert await holder.states.get() == ("closed", "done")
            (await dial(identity("client"), SECRET, address)).close()

    run(case())


def test_an_id_configured_elsewhere_is_refused():
    async def case():
        async with listening(configured={"client": ["192.0.2.1"]}) as (_, address, _links):
            with pytest.raises(Refused, match=r"192\.0\.2\.1"):
                await dial(identity("client"), SECRET, address)
            (await dial(identity("other"), SECRET, address)).close()

    run(case())


def test_a_full_house_is_said_so():
    async def case():
        async with listening() as (listener, address, _links):
            listener.admission.limit = 1
            first = await dial(identity("one"), SECRET, address)
            with pytest.raises(Refused, match="no room"):
                await dial(identity("two"), SECRET, address)
            first.close()

    run(case())


def test_a_node_does_not_join_itself():
    async def case():
        incarnation = new_incarnation()
        async with listening() as (listener, address, _links):
            listener._identity = identity("server", incarnation=incarnation)
            with pytest.raises(HandshakeError):
                await dial(identity("client", incarnation=incarnation), SECRET, address)

    run(case())
