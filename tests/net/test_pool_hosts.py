"""Lasting connections between hosts whose network loses things without a word."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import State
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.util import times
from tests.hosts import Host, hosts
from tests.net.helpers import run
from tests.net.pools import Party, until


@contextlib.contextmanager
def standing_on(host: Host, node_id: str) -> Iterator[Party]:
    """A node on `host`, on a thread of its own, until the end."""
    made: queue.Queue[Party] = queue.Queue()
    over = threading.Event()

    async def live() -> None:
        party = Party(node_id)
        party.address = await party.listener.start(host.address)
        made.put(party)
        while not over.is_set():
            await asyncio.sleep(0.02)
        await party.pool.close()
        await party.listener.close()

    def body() -> None:
        with host.inside():
            asyncio.run(live())

    thread = threading.Thread(target=body, name=f"node-{node_id}")
    thread.start()
    try:
        yield made.get(timeout=10)
    finally:
        over.set()
        thread.join(20)


def forget_connection(here: Host, there: Host, port: int) -> None:
    """A firewall between the two loses its memory of the connection that comes from `port` of `here`."""
    for host, match in ((here, f"tcp dport {port}"), (there, f"tcp sport {port}")):
        rules = f"""
            add table inet forgetful
            add chain inet forgetful arriving {{ type filter hook prerouting priority 0; policy accept; }}
            add rule inet forgetful arriving {match} drop
        """
        ran = host.run(["nft", "-f", "-"], input=rules)
        assert ran.returncode == 0, ran.stderr


def test_a_connection_that_a_firewall_forgot_costs_one_retry():
    """Case 34."""

    async def case(a: Host, b: Host, other: Party) -> None:
        party = Party("a")
        await party.listener.start(a.address)
        party.pool.add("b", [other.address])
        await until(lambda: party.links("b"))
        assert await party.ask("b") == "b"
        forget_connection(a, b, party.links("b")[0]._sock.getsockname()[1])
        began = time.monotonic()
        assert await party.ask("b") == "b"
        assert time.monotonic() - began < 5
        assert State.DEAD not in party.states("b")
        await party.pool.close()
        await party.listener.close()

    with hosts(2) as (a, b), standing_on(b, "b") as other, a.inside():
        run(case(a, b, other))


def test_a_host_that_falls_silent_is_suspect_then_dead_then_back():
    """Case 34: and what is asked meanwhile ends in an error that names it."""

    async def case(b: Host, other: Party) -> None:
        party = Party("a")
        party.pool.add("b", [other.address])
        await until(lambda: party.links("b"))
        began = asyncio.get_running_loop().time()
        await asyncio.to_thread(b.cut)
        asked = time.monotonic()
        with pytest.raises(MlxcelError, match="b: "):
            await party.ask("b")
        assert time.monotonic() - asked < 6
        await until(lambda: party.state("b") is State.DEAD)
        took = [change.at - began for change in party.changes[1:]]
        assert party.states("b") == [State.ALIVE, State.QUIET, State.DEAD]
        assert times.SUSPECT_S - 1.5 < took[0] < took[1], took
        assert times.DEAD_S - 1.5 < took[1] < times.DEAD_S + 5, took
        assert "silent" in party.pool.info()["b"]["reason"]
        await asyncio.to_thread(b.mend)
        await until(lambda: party.state("b") is State.ALIVE, 30)
        assert await party.ask("b") == "b"
        await party.pool.close()

    with hosts(2) as (a, b), standing_on(b, "b") as other, a.inside():
        run(case(b, other), 50)


def test_a_peer_with_two_paths_is_reached_by_the_one_that_is_left():
    async def case(b: Host, other: Party) -> None:
        party = Party("a")
        first = Address(b.addresses["tb0"], other.address.port)
        party.pool.add("b", [first, other.address])
        await until(lambda: party.links("b"), 20)
        assert await party.ask("b") == "b"
        assert party.pool.info()["b"]["link"]["address"] == str(other.address)
        await party.pool.close()

    with hosts(2, links=("eth0", "tb0")) as (a, b), standing_on(b, "b") as other, a.inside():
        b.cut("tb0")
        run(case(b, other), 40)
