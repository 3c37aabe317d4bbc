"""Discovery with real sockets: processes of one host by loopback, hosts by every interface they share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import psutil
import pytest

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import ConfigError
from mlxcel_nb.net.discovery.beacons import SOURCE_AT_ONCE, SOURCE_PER_S, Announcement, Beacons, discover, unix_ms
from mlxcel_nb.net.discovery.legs import Leg, legs
from mlxcel_nb.net.discovery.sightings import Event, Heard, Sighting
from mlxcel_nb.net.links import resolver
from mlxcel_nb.wire.beacon import EVERY_S, PORT, Beacon, encode
from mlxcel_nb.wire.keys import beacon_key
from tests.hosts import Host, hosts

SECRET, OTHER = Secret(b"a secret for discovery"), Secret(b"another one altogether")
ALONE = 20_000 + os.getpid() % 10_000
"""A port that nothing else on this machine uses, nor another worker of this run: for tests that stay on its loopback.
It lies below those that systems hand out by themselves."""

LOOPBACK = {Heard("lo", "broadcast"), Heard("lo", "multicast")}
EVERY_WAY = {"broadcast", "multicast", "IPv6"}


def loopback_only() -> list[Leg]:
    return [leg for leg in legs() if leg.loopback]


def run(coro: Awaitable[None], within_s: float = 45.0) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(within_s):
            await coro

    asyncio.run(bounded())


async def until(condition: Callable[[], Any], within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


def named(node_id: str, listens: str | None = "0.0.0.0:9000", incarnation: bytes | None = None) -> Announcement:
    address = None if listens is None else parse_address(listens)
    return Announcement(node_id=node_id, role="hybrid", incarnation=incarnation or new_incarnation(), listens=address)


@contextlib.asynccontextmanager
async def at_home(node_id: str, listens: str = "127.0.0.1:9000", **options: Any) -> AsyncIterator[Beacons]:
    """A node on this machine's loopback and nowhere else."""
    options = {"secrets": [SECRET], "announce": named(node_id, listens), "find_legs": loopback_only, **options}
    beacons = Beacons("c", port=ALONE, **options)
    await beacons.start()
    try:
        yield beacons
    finally:
        beacons.stop()


@contextlib.asynccontextmanager
async def on(host: Host, node_id: str | None, **options: Any) -> AsyncIterator[Beacons]:
    """A node, or with None a listener, on a host of its own."""

    def find_legs() -> list[Leg]:
        with host.inside():
            return legs()

    announce = named(node_id) if node_id else None
    beacons = Beacons("c", **{"secrets": [SECRET], "announce": announce, "find_legs": find_legs, **options})
    with host.inside():
        await beacons.start()
    try:
        yield beacons
    finally:
        beacons.stop()


def descriptors() -> int:
    return psutil.Process().num_fds()


def heard(beacons: Beacons) -> dict[str, Sighting]:
    return {node.node_id: node for node in beacons.nodes}


def ways(node: Sighting, interface: str = "eth0") -> set[str]:
    return {path.way for path in node.paths if path.interface == interface}


# ------------------------------------------------------------------------------------------------- one host


def test_processes_of_one_host_share_the_port_and_hear_each_other_once() -> None:
    async def body() -> None:
        changes: list[Any] = []
        async with at_home("a", on_change=changes.append) as a, at_home("b", "127.0.0.1:9001") as b:
            await until(lambda: heard(a).keys() == {"b"} and heard(b).keys() == {"a"})
            await until(lambda: set(heard(a)["b"].paths) == LOOPBACK)
            assert heard(a)["b"].addresses == (Address("127.0.0.1", 9001),)
            assert [change.event for change in changes] == [Event.FOUND]
            for seconds in (3.0, 6.0):  # the second time for a machine that stood still for most of the first
                found = await discover("c", [SECRET], seconds=seconds, port=ALONE, find_legs=loopback_only)
                if len(found.nodes) == 2:
                    break
            assert [node.node_id for node in found.nodes] == ["a", "b"]
            assert found.foreign == found.replayed == found.malformed == 0
            assert json.loads(json.dumps(found.to_dict()))["nodes"][1]["addresses"] == ["127.0.0.1:9001"]

    run(body())


def test_a_node_that_listens_only_at_home_is_told_of_only_there() -> None:
    everywhere = [*loopback_only(), Leg(name="eth9", index=4242, addresses=("10.9.9.9",))]

    async def body() -> None:
        async with at_home("a", find_legs=lambda: everywhere) as a:
            await until(lambda: a.sent)
            assert {path.interface for path in a.sent} == {"lo"}

    run(body())


def test_a_name_that_means_loopback_is_announced_as_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 46: a host's own name is 127.0.1.1 on some systems; told abroad it would lead everybody to themselves."""

    def home(host: str, port: int, family: socket.AddressFamily) -> list[Any]:
        assert host == "myself"
        return [(family, ("127.0.1.1", port))] if family == socket.AF_INET else []

    monkeypatch.setattr(resolver, "resolve", home)

    async def body() -> None:
        async with at_home("a", "myself:9000"), at_home("b") as b:
            await until(lambda: "a" in heard(b))
            assert heard(b)["a"].addresses == (Address("127.0.1.1", 9000),)

    run(body())


def test_a_clock_that_is_off_is_reported_and_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with at_home("right") as right, at_home("fast", clock_ms=lambda: unix_ms() + 45_000) as fast:
            await until(lambda: right.findings().clocks and fast.findings().clocks)
            assert not right.nodes and not fast.nodes
            assert right.findings().clocks["fast"] == pytest.approx(45, abs=3)
            assert fast.findings().clocks["right"] == pytest.approx(-45, abs=3)
            await until(lambda: sum(right.sent.values()) >= 4)  # more beacons, and no more lines

    run(body())
    lines = [record.message for record in caplog.records]
    assert len([line for line in lines if "fast: its clock is 45 seconds ahead" in line]) == 1
    assert len([line for line in lines if "right: its clock is 45 seconds behind" in line]) == 1


def test_strangers_and_other_clusters_are_counted_and_not_shown() -> None:
    async def body() -> None:
        async with (
            at_home("a") as a,
            at_home("stranger", secrets=[OTHER]),
            at_home("newer", secrets=[OTHER, SECRET]) as newer,
        ):
            await until(lambda: a.findings().foreign >= 4 and heard(newer).keys() == {"a", "stranger"})
            assert not a.nodes

    run(body())

    async def other_cluster() -> None:
        elsewhere = Beacons("d", [SECRET], announce=named("a"), port=ALONE, find_legs=loopback_only)
        async with at_home("a") as a:
            await elsewhere.start()
            await until(lambda: a.findings().elsewhere)
            assert not a.nodes and not a.findings().foreign
            elsewhere.stop()

    run(other_cluster())


def test_a_namesake_is_told_of_once_and_taken_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with at_home("a") as a, at_home("a", "127.0.0.1:9001") as namesake, at_home("watcher") as watcher:
            await until(lambda: sum(namesake.sent.values()) >= 4 and "a" in heard(watcher))
            await until(lambda: heard(watcher)["a"].rivals == 1)
            assert "a" not in heard(a) and "a" not in heard(namesake)

    run(body())
    lines = [record.message for record in caplog.records]
    assert len([line for line in lines if "goes by this node's id a" in line]) == 2, "each of the two says it once"
    assert any("several processes announce the node id a" in line for line in lines)


def test_a_restarted_node_is_one_entry_with_its_new_process() -> None:
    async def body() -> None:
        async with at_home("watcher") as watcher:
            async with at_home("a"):
                await until(lambda: "a" in heard(watcher))
                before = heard(watcher)["a"].incarnation
            async with at_home("a", "127.0.0.1:9005"):
                await until(lambda: heard(watcher)["a"].incarnation != before)
                await until(lambda: heard(watcher)["a"].addresses == (Address("127.0.0.1", 9005),))

    run(body())


def test_a_secret_is_changed_while_nodes_announce_themselves() -> None:
    async def body() -> None:
        async with at_home("a") as a, at_home("b", "127.0.0.1:9001") as b:
            await until(lambda: heard(a).keys() == {"b"} and heard(b).keys() == {"a"})
            a.use([OTHER, SECRET])
            b.use([OTHER, SECRET])
            foreign = a.findings().foreign
            last = heard(a)["b"].last
            await until(lambda: heard(a)["b"].last > last + EVERY_S)
            a.use([OTHER])
            last = heard(a)["b"].last
            await until(lambda: heard(a)["b"].last > last)
            assert a.findings().foreign == foreign
            b.use([SECRET])  # one that nobody told the news
            await until(lambda: a.findings().foreign > foreign)

    run(body())


def test_stop_leaves_no_socket_and_says_nothing_more() -> None:
    async def body() -> None:
        before = descriptors()
        async with at_home("a") as a:
            assert descriptors() > before
        a.stop()
        assert descriptors() <= before
        assert not a._timers

    run(body())


def test_a_program_that_does_not_share_the_port_is_an_error_and_nothing_stays_open() -> None:
    async def body() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as selfish:
            selfish.bind(("127.0.0.1", ALONE))
            before = descriptors()
            with pytest.raises(ConfigError, match=f"UDP port {ALONE}"):
                async with at_home("a"):
                    pass
            assert descriptors() <= before

    run(body())


def test_a_flood_of_foreign_datagrams_costs_a_counter_and_hides_nobody() -> None:
    async def body() -> None:
        async with at_home("a") as a:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
                flood.setblocking(False)
                flood.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                flood.bind(("127.66.6.6", 0))  # not where the node sends from
                loop, sent = asyncio.get_running_loop(), 0
                began = loop.time()
                while sent < 5000 and loop.time() < began + 20:
                    for _ in range(100):
                        with contextlib.suppress(BlockingIOError):
                            sent += bool(flood.sendto(b"MXNB" + os.urandom(300), ("127.255.255.255", ALONE)))
                    await asyncio.sleep(0)  # the listener's turn
                took = loop.time() - began
            found = a.findings()
            assert found.crowded > 0 and len(a._sources) <= 2
            assert found.foreign <= SOURCE_AT_ONCE + SOURCE_PER_S * took + 1
            async with at_home("b"):
                await until(lambda: "b" in heard(a))

    run(body())


# ------------------------------------------------------------------------------------------------- several hosts


def test_three_hosts_with_two_links_hear_each_other_once_by_every_way() -> None:
    """Case 46: what is told abroad can be dialled from there, and is nobody's loopback."""

    async def body(a: Host, b: Host, c: Host) -> None:
        listens = parse_address("[::]:9000")
        told = {name: replace(named(name), listens=listens) for name in "abc"}
        async with (
            on(a, "a", announce=told["a"]) as one,
            on(b, "b", announce=told["b"]) as two,
            on(c, "c", announce=told["c"]) as three,
        ):
            nodes = [(one, "bc"), (two, "ac"), (three, "ab")]
            await until(lambda: all("".join(sorted(heard(node))) == others for node, others in nodes))
            await until(lambda: all(ways(node, link) == EVERY_WAY for node in one.nodes for link in ("eth0", "tb0")))
            seen = heard(one)["b"]
            for link in ("eth0", "tb0"):
                for host in (b.addresses[link], b.addresses6[link], f"{b.link_locals[link]}%{link}"):
                    assert Address(host, 9000) in seen.addresses
            assert not any(address.is_loopback for address in seen.addresses)
            with b.inside():
                server = socket.create_server(("::", 9000), family=socket.AF_INET6, dualstack_ipv6=True)
            with server:  # every address that is told can be dialled from here
                for address in seen.addresses:
                    with a.inside():
                        socket.create_connection((address.host, address.port), timeout=10).close()
            assert one.findings().replayed == 0 and not one.findings().troubles

    with hosts(3, links=("eth0", "tb0")) as (a, b, c):
        run(body(a, b, c))


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ("meta nfproto ipv6 drop; ip daddr 224.0.0.0/4 drop", "broadcast"),
        ("meta nfproto ipv6 drop; ip daddr 10.77.0.255 drop", "multicast"),
        ("meta nfproto ipv4 udp dport 49555 drop", "IPv6"),
    ],
    ids=["broadcast", "multicast", "ipv6"],
)
def test_one_way_is_enough(lost: str, left: str) -> None:
    async def body(a: Host, b: Host) -> None:
        async with on(a, "a") as one, on(b, "b") as two:
            await until(lambda: "b" in heard(one) and "a" in heard(two))
            assert ways(heard(one)["b"]) == {left} and ways(heard(two)["a"]) == {left}

    with hosts(2) as (a, b):
        for host in (a, b):
            rules = "".join(f"add rule inet lossy input {rule}\n" for rule in lost.split("; "))
            text = f"add table inet lossy\nadd chain inet lossy input {{ type filter hook input priority 0; }}\n{rules}"
            assert host.run(["nft", "-f", "-"], input=text).returncode == 0
        run(body(a, b))


def test_a_datagram_sent_again_counts_as_a_replay() -> None:
    async def body(a: Host, b: Host) -> None:
        beacon = Beacon(
            time_ms=unix_ms(), nonce=os.urandom(16), incarnation=os.urandom(16), cluster="c", node_id="b",
            role="hybrid", addresses=("10.77.0.2:9000", "127.0.0.1:9000", "10.77.0.1:9000"),
        )  # fmt: skip
        datagram = encode(beacon, beacon_key(SECRET.reveal()))
        async with on(a, None) as one:
            with b.inside(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as recorder:
                recorder.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                for _ in range(3):
                    recorder.sendto(datagram, ("10.77.0.255", PORT))
            await until(lambda: one.findings().replayed == 2)
            assert heard(one)["b"].addresses == (Address("10.77.0.2", 9000),)
            assert not one.sent

    with hosts(2) as (a, b):
        run(body(a, b))


def test_interfaces_come_and_go_and_one_that_may_not_send_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def ip(host: Host, *words: str) -> None:
        assert host.run(["ip", "link", "set", *words]).returncode == 0

    async def body(a: Host, b: Host) -> None:
        ip(b, "tb0", "down")
        async with on(a, "a") as one, on(b, "b") as two:
            await until(lambda: "b" in heard(one))
            assert two.findings().interfaces == ("eth0", "lo") and not ways(heard(one)["b"], "tb0")
            ip(b, "tb0", "up")
            await until(lambda: "broadcast" in ways(heard(one)["b"], "tb0"))
            await until(lambda: "multicast" in ways(heard(two)["a"], "tb0"))  # it joined the group again
            ip(b, "tb0", "down")
            await until(lambda: two.findings().interfaces == ("eth0", "lo"))
            rule = "type filter hook output priority 0; oifname eth0 ip daddr 239.0.0.0/8 drop"
            refuse = f"table inet no {{ chain out {{ {rule}; }}; }}"
            assert b.run(["nft", refuse]).returncode == 0
            await until(lambda: two.findings().troubles)
            (trouble,) = two.findings().troubles
            assert trouble.startswith("cannot send by eth0 multicast: ")
            sent = two.sent[Heard("eth0", "broadcast")]
            await until(lambda: two.sent[Heard("eth0", "broadcast")] > sent)
            assert "b" in heard(one) and "a" in heard(two)
            assert b.run(["nft", "delete table inet no"]).returncode == 0
            await until(lambda: not two.findings().troubles)

    with hosts(2, links=("eth0", "tb0")) as (a, b):
        run(body(a, b))
    assert len([r for r in caplog.records if "cannot send by eth0 multicast" in r.message]) == 1


def test_the_command_shows_who_announces_on_another_host(tmp_path: Any) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET.reveal())
    secret.chmod(0o600)

    async def body(a: Host, b: Host) -> None:
        async with on(b, "bee"):
            command = [sys.executable, "-m", "mlxcel_nb", "discover", "--cluster", "c", "--secret-file", str(secret)]
            asked = a.popen([*command, "--seconds", "5"], stdout=-1, stderr=-1, text=True)
            asked_json = a.popen([*command, "--seconds", "5", "--json"], stdout=-1, stderr=-1, text=True)
            deaf = a.popen([*command, "--seconds", "0.1", "--cluster", "other"], stdout=-1, stderr=-1, text=True)
            (text, _), (lines, _), (nothing, _) = await asyncio.gather(
                *(asyncio.to_thread(process.communicate, None, 40) for process in (asked, asked_json, deaf))
            )
        assert asked.returncode == asked_json.returncode == 0
        assert "Nodes of cluster c\n" in text and "bee" in text and "10.77.0.2:9000" in text and "eth0 (" in text
        (node,) = json.loads(lines)["nodes"]
        assert node["node_id"] == "bee" and {"interface": "eth0", "way": "IPv6"} in node["heard_by"]
        assert deaf.returncode == 1
        assert "UDP port 49555" in nothing and "cluster name and secret" in nothing

    with hosts(2) as (a, b):
        run(body(a, b), 58)
