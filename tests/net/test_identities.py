"""One id is one process at one address: what the listener makes of a newcomer."""

from __future__ import annotations

import asyncio

import pytest

from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.errors import HandshakeError, Refused
from mlxcel_nb.net.links import listener as listener_module
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.util import times
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.frames import Kind, Sealer
from mlxcel_nb.wire.handshake import ClientHandshake
from tests.net.helpers import SECRET, Heard, identity, listening, raw_connection, read_all, run, shake_hands


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


def test_the_id_of_the_listener_itself_is_nobody_else_s():
    async def case():
        async with listening() as (listener, address, _links):
            own = listener._own().node_id
            with pytest.raises(Refused, match=f"'{own}': {own} is the id of this node itself and nobody else's"):
                await dial(identity(own), SECRET, address)
            assert not listener.admission

    run(case())


def test_a_holder_that_no_longer_answers_gives_way_after_a_second(monkeypatch):
    monkeypatch.setattr(times, "PROBE_S", 0.2)

    async def case():
        async with listening() as (listener, address, links):
            frozen = await dial(identity("client"), SECRET, address)  # nobody drives it: no pong
            holder = Heard(await links.get())
            newcomer = await dial(identity("client"), SECRET, address)
            state, _ = await holder.states.get()
            assert state == "dead"
            assert len(listener.admission) == 1
            told = Heard(frozen)
            state, reason = await told.states.get()
            assert state == "closed"
            assert "does not answer" in reason
            newcomer.close()

    run(case())


def test_a_client_that_says_nothing_after_the_verdict_has_a_second():
    async def case():
        async with listening() as (listener, address, _links), raw_connection(address) as sock:
            await shake_hands(sock, ClientHandshake(identity("client"), SECRET))
            began = asyncio.get_running_loop().time()
            newcomer = await dial(identity("client"), SECRET, address)
            assert times.PROBE_S - 0.1 < asyncio.get_running_loop().time() - began < times.HANDSHAKE_S
            await asyncio.wait_for(read_all(sock), 10)
            assert len(listener.admission) == 1
            newcomer.close()

    run(case())


def test_a_first_frame_within_that_second_keeps_the_place(monkeypatch):
    monkeypatch.setattr(times, "PROBE_S", 4.0)  # it is over when the frame is there

    async def case():
        async with listening() as (_, address, links), raw_connection(address) as sock:
            handshake = ClientHandshake(identity("client"), SECRET)
            await shake_hands(sock, handshake)
            refused = asyncio.ensure_future(dial(identity("client"), SECRET, address))
            await asyncio.wait([refused], timeout=0.2)
            keys = handshake.established
            assert keys is not None
            sock.send(Sealer(keys.send, keys.suite).seal(Kind.CONTROL, 0, messages.pack({"schema": 1})))
            with pytest.raises(Refused, match="another"):
                await refused
            assert (await links.get()).peer.node_id == "client"

    run(case())


def test_a_link_that_waits_for_its_driver_has_that_second_too(monkeypatch):
    """Such as one of a model whose load order has not come yet: a witness beside it answers for it."""

    async def case(life: str) -> bool:
        async with listening() as (listener, address, links):
            me, others = identity("client"), []
            waiting = await dial(me, SECRET, address)
            parked = await links.get()
            second = asyncio.ensure_future(dial(identity("client"), SECRET, address))
            await asyncio.wait([second], timeout=0.2)
            assert not second.done()
            if life == "bytes":
                waiting.sock.send(waiting.sealer.seal(Kind.PING, 0, b"iamalive"))
            elif life == "another connection":
                others.append(await dial(me, SECRET, address))
            elif life == "end":
                waiting.close()
                parked.close()
            await asyncio.wait([second])
            admitted = second.exception() is None
            if admitted:
                (await second).close()
                assert life == "end" or await read_all(waiting.sock) == b""
            else:
                assert isinstance(second.exception(), Refused)
                assert len(listener.admission.holding("client")) == 1 + len(others)
                assert parked.sock.fileno() >= 0
            for link in [waiting, *others]:
                link.close()
            return admitted

    assert run(case("none"))
    assert run(case("end"))
    monkeypatch.setattr(times, "PROBE_S", 2.5)  # what comes within it comes late on a busy machine
    assert not run(case("bytes"))
    assert not run(case("another connection"))


def test_a_restarted_process_gets_all_its_connections_and_no_third_process_any():
    """Several dial while the dead one is asked; those of the first to be admitted stay."""

    async def case():
        async with listening() as (listener, address, links):
            dead = await dial(identity("client"), SECRET, address)
            await links.get()
            again, third = identity("client"), identity("client")
            results = await asyncio.gather(
                dial(again, SECRET, address),
                dial(again, SECRET, address),
                dial(third, SECRET, address),
                return_exceptions=True,
            )
            admitted = [r for r in results if not isinstance(r, BaseException)]
            refused = [r for r in results if isinstance(r, Refused)]
            assert {len(admitted), len(refused)} <= {1, 2} and len(admitted) + len(refused) == 3
            made = [await links.get() for _ in admitted]
            assert len({link.peer.incarnation for link in made}) == 1
            assert len(listener.admission) == len(admitted)
            for link in [dead, *admitted]:
                link.close()

    run(case())


def test_many_who_ask_for_a_living_one_s_place_do_not_drive_it_out():
    async def case():
        async with listening() as (_, address, links):
            first = Heard(await dial(identity("client"), SECRET, address))
            holder = Heard(await links.get())
            results = await asyncio.gather(
                *(dial(identity("client"), SECRET, address) for _ in range(30)), return_exceptions=True
            )
            assert all(isinstance(result, Refused) for result in results)
            assert first.link.open and holder.link.open
            first.link.close()
            holder.link.close()

    run(case())


def test_a_process_at_another_address_is_told_so_while_the_first_lives(monkeypatch):
    monkeypatch.setattr(times, "PROBE_S", 0.2)

    async def case():
        async with listening() as (_, address, links):
            who = identity("client")
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(listener_module, "peer_address", lambda _: ("192.0.2.1", 1))
                first = await dial(who, SECRET, address)
            holder, told = Heard(await links.get()), Heard(first)
            for incarnation in (who.incarnation, new_incarnation()):
                with pytest.raises(Refused, match=r"refuses the identity.*192\.0\.2\.1"):
                    await dial(identity("client", incarnation=incarnation), SECRET, address)
            told.link._loop.remove_reader(first.sock.fileno())  # it answers no more
            (await dial(identity("client"), SECRET, address)).close()
            assert (await holder.states.get())[0] == "dead"
            told.link.close()

    run(case())


def test_the_refusal_of_a_second_process_says_it_once():
    async def case():
        async with listening() as (_, address, links):
            first = Heard(await dial(identity("client"), SECRET, address))
            holder = Heard(await links.get())
            with pytest.raises(Refused) as refusal:
                await dial(identity("client"), SECRET, address)
            assert refusal.value.cause.endswith("already has a live node 'client' of another incarnation")
            first.link.close()
            holder.link.close()

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
