"""Lasting connections between nodes: made ahead of need, made again, and never two for long."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import time
from typing import Any

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import State
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.errors import AuthenticationFailed, MlxcelError, PeerLost, StepTimeout
from mlxcel_nb.net.links.dial import Dialler, dial
from mlxcel_nb.net.pool import pool as pool_module
from mlxcel_nb.util import times
from tests.net.helpers import OTHER_SECRET, SECRET, run
from tests.net.pools import Party, acquainted, party, until
from tests.net.relay import relay

NO_LINGER = struct.pack("ii", 1, 0)
"""Closing is a reset."""


def reset(who: Party, node_id: str) -> None:
    """Break the connections of `who` to `node_id`, as a network does."""
    for link in [*who.links(node_id), *who.guests]:
        link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        link._sock.shutdown(socket.SHUT_RDWR)


def freeze(who: Party) -> None:
    """Its process is stopped: it says nothing any more, and its connections stay open."""
    for keeper in who.pool._keepers.values():
        keeper.cancel()
    who.pool._timer.cancel()
    for peer in who.pool._peers.values():
        for link in peer.links:
            link._loop.remove_reader(link._fd)
            link._timer.cancel()


def test_two_nodes_share_one_connection_for_all_that_is_asked():
    async def case():
        async with acquainted() as (a, b):
            answers = await asyncio.gather(*(a.ask("b") for _ in range(50)), *(b.ask("a") for _ in range(50)))
            assert answers == ["b"] * 50 + ["a"] * 50
            await until(lambda: len(a.links("b")) == len(b.links("a")) == 1)
            assert a.listener.counts["established"] + b.listener.counts["established"] <= 2
            assert a.states("b") == b.states("a") == [State.ALIVE]

    run(case())


def test_a_connection_is_there_before_anybody_asks_and_no_request_makes_one():
    async def case():
        async with acquainted() as (a, b):
            before = a.listener.counts["established"] + b.listener.counts["established"]
            for _ in range(20):
                assert await a.ask("b") == "b"
            assert a.listener.counts["established"] + b.listener.counts["established"] == before

    run(case())


def test_when_both_dial_at_once_the_lower_id_s_connection_stays(monkeypatch):
    monkeypatch.setattr(pool_module, "HEAD_START_S", 0.0)
    monkeypatch.setattr(pool_module, "RETIRE_S", 0.1)

    async def case():
        for _ in range(5):
            async with party("a") as a, party("b") as b:
                a.pool.add("b", [b.address])
                b.pool.add("a", [a.address])
                await until(lambda: a.links("b") and b.links("a"))
                pending = [asyncio.ensure_future(b.ask("a")) for _ in range(10)]
                await until(lambda: a.listener.counts["established"] and b.listener.counts["established"])
                await until(lambda: len(a.links("b")) == len(b.links("a")) == 1)
                assert a.links("b")[0].link.dialled and not b.links("a")[0].link.dialled
                assert await asyncio.gather(*pending) == ["a"] * 10
                assert State.DEAD not in a.states("b") + b.states("a")

    run(case())


def test_one_that_only_the_higher_id_knows_of_is_dialled_by_it():
    async def case():
        async with party("a") as a, party("b") as b:
            b.pool.add("a", [a.address])
            await until(lambda: b.links("a"))
            assert b.state("a") is State.ALIVE

    run(case())


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("b", "a")])
def test_a_node_that_hears_of_its_peer_late_uses_the_connection_that_came_meanwhile(monkeypatch, first, second):
    """Beacons tell one side seconds before the other; heartbeats then come by the connection that was there first."""
    monkeypatch.setattr(times, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(times, "PING_S", 0.05)

    async def case():
        async with party(first) as early, party(second) as late:
            early.pool.add(second, [late.address])
            await until(lambda: late.listener.counts["established"] == 1 and early.links(second))
            assert not late.links(first)
            late.pool.add(first, [early.address])
            beats = set()

            def three_beats() -> bool:
                beats.add(late.pool.membership.members[first].beat_at)
                return len(beats) > 3

            await until(three_beats)
            assert not late.links(first)[0].link.dialled
            assert early.listener.counts["established"] == 0, "the late one dialled all the same"
            assert State.DEAD not in early.states(second) + late.states(first)
            assert await late.ask(first) == first
            assert await early.ask(second) == second

    run(case())


def test_a_reset_is_mended_and_the_peer_was_never_dead():
    async def case():
        async with acquainted() as (a, b):
            await until(lambda: len(a.links("b")) == len(b.links("a")) == 1)
            for _ in range(2):
                reset(a, "b")
                await until(lambda: a.state("b") is State.CUT or len(a.states("b")) > 1)
                await until(lambda: a.links("b") and b.links("a"))
                assert await a.ask("b") == "b" and await b.ask("a") == "a"
            assert State.DEAD not in a.states("b")

    run(case())


def test_a_peer_that_ends_is_dead_within_a_moment_and_back_when_it_returns():
    async def case():
        async with party("a") as a:
            async with party("b") as b:
                a.pool.add("b", [b.address])
                await until(lambda: a.state("b") is State.ALIVE and b.guests)
                await b.listener.close()
                began = asyncio.get_running_loop().time()
                reset(b, "a")
                await until(lambda: a.state("b") is State.DEAD)
                assert asyncio.get_running_loop().time() - began < times.SUSPECT_S
                assert "connection refused" in a.pool.info()["b"]["reason"]
            again = Party("b")
            await again.listener.start(b.address.host, b.address.port)
            again.pool.add("a", [a.address])
            await until(lambda: a.state("b") is State.ALIVE)
            assert a.states("b") == [State.ALIVE, State.CUT, State.DEAD, State.ALIVE]
            assert a.changes[-1].restarted
            await again.pool.close()
            await again.listener.close()

    run(case(), 40)


def test_a_goodbye_is_told_as_one():
    async def case():
        async with acquainted() as (a, b):
            await b.listener.close()
            await b.pool.close()
            await until(lambda: a.state("b") is State.DEAD)
            assert a.pool.info()["b"]["reason"] == "node stops" or "refused" in a.pool.info()["b"]["reason"]
            assert State.CUT not in a.states("b")

    run(case())


@pytest.mark.parametrize("asker", ["lower", "higher"])
def test_an_idle_connection_that_was_cut_in_silence_costs_one_retry(asker):
    """Case 34: a proxy forgets a connection without a word to either side."""

    async def case():
        async with party("b") as b, relay(b.address) as between, party("a" if asker == "lower" else "c") as a:
            a.pool.add("b", [between.address])
            await until(lambda: a.links("b"))
            assert await a.ask("b") == "b"
            between.cut()
            began = time.monotonic()
            assert await a.ask("b") == "b"
            assert time.monotonic() - began < 5
            assert between.connections == 2
            assert b.asked == 2, "it went to the peer once by each connection at the most"
            assert State.DEAD not in a.states("b")

    run(case())


def test_a_reset_while_an_answer_is_due_costs_one_retry():
    """Case 34."""

    async def case():
        async with acquainted() as (a, b):
            b.mute = True
            asked = asyncio.ensure_future(a.ask("b"))
            await until(lambda: b.asked == 1)
            b.mute = False
            reset(b, "a")
            assert await asked == "b"
            assert b.asked == 2

    run(case())


def test_a_peer_that_is_there_but_does_not_answer_is_waited_for_and_not_asked_again():
    async def case():
        async with acquainted() as (a, b):
            b.mute = True
            with pytest.raises(StepTimeout, match=r"b: waited 2\.5 s for an answer to 'status'"):
                await a.ask("b", within_s=2.5)
            assert b.asked == 1

    run(case())


def test_nobody_there_is_an_error_that_names_the_node_after_growing_delays(monkeypatch):
    """Case 34."""
    attempts = []

    dial_node = Dialler.dial_node

    async def counted(*args):
        attempts.append(asyncio.get_running_loop().time())
        return await dial_node(*args)

    monkeypatch.setattr(Dialler, "dial_node", counted)

    async def case():
        async with party("a") as a:
            a.pool.add("b", [Address("127.0.0.1", 1)])
            began = asyncio.get_running_loop().time()
            with pytest.raises(PeerLost, match=r"b: no connection after \d attempts: host 127.0.0.1:1 is offline"):
                await a.ask("b")
            assert asyncio.get_running_loop().time() - began < 5
            assert a.state("b") is State.UNSEEN
            assert a.pool.info()["b"]["failed_attempts"] > 0

    run(case())
    gaps = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert len(gaps) >= 3 and max(gaps) > 1.5 * min(gaps)


def test_a_wrong_secret_is_said_at_once_and_is_not_offline(caplog):
    """Case 50."""

    async def case():
        async with party("a", secrets=(OTHER_SECRET,)) as a, party("b") as b:
            a.pool.add("b", [b.address])
            with pytest.raises(AuthenticationFailed, match="authentication failed with host"):
                await a.ask("b")
            assert "authentication failed" in a.pool.info()["b"]["reason"]
            await until(lambda: a.pool.info()["b"]["failed_attempts"] > 2)

    run(case())
    ours = [record for record in caplog.records if record.name == "mlxcel_nb.net.pool"]
    assert len(ours) == 1, "a refusal that repeats itself is said once"


def test_what_the_peer_answers_with_an_error_is_raised():
    async def case():
        async with acquainted() as (a, b):
            b.pool._on_message = lambda link, message: link.send(
                {"type": "error", "id": message["id"], "error": {"code": "busy", "cause": "not now", "node": "b"}}
            )
            with pytest.raises(MlxcelError, match="b: not now"):
                await a.ask("b")

    run(case())


def test_messages_without_an_answer_need_a_connection():
    async def case():
        async with acquainted() as (a, b):
            a.pool.send("b", {"type": "note", "n": 1})
            await until(lambda: b.heard)
            assert b.heard == [{"type": "note", "n": 1}]
            with pytest.raises(PeerLost, match="z: is not among"):
                a.pool.send("z", {"type": "note"})
            a.pool.add("y", [Address("127.0.0.1", 1)])
            with pytest.raises(PeerLost, match="y: unseen"):
                a.pool.send("y", {"type": "note"})

    run(case())


def test_heartbeats_carry_progress(monkeypatch):
    monkeypatch.setattr(times, "HEARTBEAT_S", 0.1)

    async def case():
        async with acquainted() as (a, b):
            b.pool._progress = lambda: (41, True)
            await until(lambda: a.pool.info()["b"]["progress"] == 41)
            assert a.pool.info()["b"]["busy"] is True
            assert a.pool.info()["b"]["heartbeat_s"] < 5
            assert not a.heard, "a heartbeat is no message for others"

    run(case())


def test_heartbeats_carry_the_load_as_far_as_it_is_figures(monkeypatch):
    monkeypatch.setattr(times, "HEARTBEAT_S", 0.1)
    many = {f"figure {number}": number for number in range(100)}
    told: Any = {"running": 3, "kv": 0.5, "word": "x", "on": True, "nan": float("nan"), "x" * 99: 1}

    async def case():
        async with acquainted() as (a, b):
            b.pool._load = lambda: dict(told)
            await until(lambda: a.pool.info()["b"]["load"])
            assert a.pool.info()["b"]["load"] == {"running": 3, "kv": 0.5}
            b.pool._load = lambda: many
            await until(lambda: "figure 0" in a.pool.info()["b"]["load"])
            assert len(a.pool.info()["b"]["load"]) <= 32

    run(case())


@pytest.mark.parametrize("asker", ["a", "c"])
def test_a_restarted_peer_replaces_its_predecessor_at_once(asker):
    """The predecessor is stopped: it does not even close its connections."""

    async def case():
        async with party(asker) as here, party("b") as old, party("b") as new:
            here.pool.add("b", [old.address])
            old.pool.add(asker, [here.address])
            await until(lambda: here.links("b") and old.links(asker))
            await asyncio.sleep(pool_module.HEAD_START_S)  # both have dialled by now, if both were about to
            freeze(old)
            here.pool.add("b", [new.address])
            new.pool.add(asker, [here.address])
            began = asyncio.get_running_loop().time()
            await until(lambda: here.pool.info()["b"]["incarnation"] == new.me.incarnation.hex())
            assert asyncio.get_running_loop().time() - began < times.DEAD_S - 1, "it was let in before silence told"
            assert await here.ask("b") == "b" and new.asked == 1
            assert here.changes[-1].restarted and here.state("b") is State.ALIVE

    run(case())


def test_a_peer_that_is_taken_off_the_list_is_left_alone():
    async def case():
        async with acquainted() as (a, b):
            a.pool.remove("b")
            assert "b" not in a.pool.info()
            await until(lambda: b.state("a") is State.DEAD or not b.links("a"))
            with pytest.raises(PeerLost):
                await a.ask("b")

    run(case())


def test_status_tells_state_path_and_reason():
    async def case():
        async with acquainted() as (a, _b):
            found = a.pool.info()["b"]
            assert found["state"] == "alive" and found["reason"] == ""
            assert len(found["incarnation"]) == 32
            assert found["link"]["address"].startswith("127.0.0.1:")
            assert found["link"]["transport"] == "tcp"

    run(case())


def test_closing_ends_what_waits_and_leaves_nothing():
    async def case():
        async with acquainted() as (a, b):
            b.mute = True
            asked = asyncio.ensure_future(a.ask("b"))
            await until(lambda: b.asked)
            await a.pool.close()
            with pytest.raises(PeerLost):
                await asked
            assert not a.links("b") and all(keeper.done() for keeper in a.pool._keepers.values())

    run(case())


def test_old_and_new_secret_are_both_let_in_while_both_are_named_and_then_only_the_new():
    """Case 50: the secret is changed while the cluster runs."""

    async def case():
        async with party("a", secrets=(SECRET,)) as a, party("b", secrets=(SECRET,)) as b:
            a.pool.add("b", [b.address])
            b.pool.add("a", [a.address])
            await until(lambda: a.links("b") and b.links("a"))
            for each in (b, a):  # one node after the other learns the new secret, and keeps the old one for a while
                each.listener.use([OTHER_SECRET, SECRET])
                each.dialler.secrets = Secrets(OTHER_SECRET, SECRET)
                reset(a, "b")
                await until(lambda: a.links("b") and b.links("a"))
                assert await a.ask("b") == "b" and await b.ask("a") == "a"
                (await dial(Party("old").me, SECRET, b.address)).close()
            for each in (a, b):
                each.listener.use([OTHER_SECRET])
                each.dialler.secrets = Secrets(OTHER_SECRET)
            assert await a.ask("b") == "b", "connections that stand are not touched"
            with pytest.raises(AuthenticationFailed):
                await dial(Party("old").me, SECRET, b.address)
            reset(a, "b")
            await until(lambda: a.links("b") and b.links("a"))
            assert await a.ask("b") == "b"
            assert State.DEAD not in a.states("b") + b.states("a")

    run(case(), 40)
