"""Nodes on hosts with two links, one of which stands for a Thunderbolt cable: which is taken, and what a cut does."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
from typing import Any

import pytest

from mlxcel_nb.client import loading
from mlxcel_nb.client.router import Router, new_id
from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.cluster.secret import random_secret
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder, Member
from tests.hosts import Host, hosts
from tests.tiny import make_tiny
from tests.waiting import until

LAYOUT = make_layout(5, pp=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


class Cluster:
    """Nodes n0 on the first host and n1 on the second, and a router on the third."""

    def __init__(self, where: list[Host], binds: tuple[str, str], **settings: Any) -> None:
        self.secret = random_secret()
        self.nodes: dict[str, Address] = {}
        processes = {}
        for number, (host, bind) in enumerate(zip(where[:2], binds, strict=True)):
            argv = [sys.executable, "-m", "tests.runtime.node_on_host", f"n{number}", bind, json.dumps(settings)]
            process = host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            process.stdin.write(self.secret.reveal().hex() + "\n")
            process.stdin.flush()
            processes[number] = process
        for number, host in enumerate(where[:2]):
            assert parse_address(processes[number].stdout.readline().strip()).port == 9000
            self.nodes[f"n{number}"] = Address(host.address, 9000)
        with where[2].inside():  # the router's thread stays on that host
            self.router = Router("test", self.secret)
        self.router.connect(self.nodes, 20.0)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(Member(node_id=node_id, address=str(address)) for node_id, address in self.nodes.items())

    def load(self, tiny) -> LoadOrder:
        order = LoadOrder(
            id=new_id(),
            instance=new_id(),
            model=str(tiny),
            layout=LAYOUT,
            members=self.members,
            dtype="auto",
            step_s=20.0,
            paths=loading.agree_paths(self.router, self.members, LAYOUT.edges()),
        )
        loading.load_parts(self.router, [order], None, lambda error: error)
        return order

    def unload(self, order) -> None:
        loading.drop_parts(self.router, [order], 20.0)

    def generate(self, order) -> list[int]:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        asked = GenerateOrder(id=new_id(), instance=order.instance, params=params, token_ids=[1, 2, 3])
        self.router.open_inbox(asked.id, lambda node, message: answers.put(message))
        self.router.send("n0", asked.to_dict())
        tokens: list[int] = []
        while (message := answers.get(timeout=30))["type"] != "end":
            tokens += message.get("tokens", [])
        assert message["error"] is None
        return tokens + message["tokens"]

    def link(self, node_id: str, other: str) -> dict[str, Any]:
        return self.status(node_id)["links"][other]

    def status(self, node_id: str) -> dict[str, Any]:
        return self.router.ask(node_id, {"type": "status"})["status"]


@pytest.fixture
def three():
    with hosts(3, links=("eth0", "tb0")) as made:
        yield made


def test_thunderbolt_is_taken_and_a_cut_cable_falls_back_with_the_reason(three, tiny) -> None:
    """Case 47."""
    a, b, _ = three
    cluster = Cluster(three, ("0.0.0.0", "0.0.0.0"))
    try:
        order = cluster.load(tiny)
        ways = order.paths[0, 1]
        assert [str(path) for path in ways] == ["Thunderbolt tb0", "wired eth0"]
        assert [str(path.address) for path in ways] == [f"{b.addresses['tb0']}:9000", f"{b.address}:9000"]
        for node, other in (("n0", "n1"), ("n1", "n0")):
            link = cluster.link(node, other)
            assert link["path"] == "Thunderbolt tb0"
            assert link["why"] == "network 10.77.1.0/24"
        assert cluster.link("n0", "n1")["address"] == f"{b.addresses['tb0']}:9000"
        # Listening on a wildcard, they publish an address that anybody can use: not the cable's.
        assert [cluster.status(n)["address"] for n in ("n0", "n1")] == [f"{a.address}:9000", f"{b.address}:9000"]
        first = cluster.generate(order)
        cluster.unload(order)

        a.cut("tb0")  # silent: both ends still have carrier and address
        order = cluster.load(tiny)
        link = cluster.link("n0", "n1")
        assert link["path"] == "wired eth0"
        assert link["why"].startswith(f"Thunderbolt tb0: host {b.addresses['tb0']}:9000 is offline: no answer within")
        assert cluster.link("n1", "n0")["path"] == "wired eth0"
        assert cluster.generate(order) == first
        cluster.unload(order)

        b.down("tb0")  # the cable is out, which its host knows
        order = cluster.load(tiny)
        assert [str(path) for path in order.paths[0, 1]] == ["wired eth0"]
        assert cluster.link("n0", "n1")["why"] == "network 10.77.0.0/24; Thunderbolt: tb0 of n1 is down"
        surroundings = cluster.status("n1")["surroundings"]
        assert (surroundings["transport"], surroundings["reason"]) == ("tcp", "Thunderbolt, but its interface is down")
        assert cluster.status("n0")["surroundings"]["transport"] == "thunderbolt"
    finally:
        cluster.router.close()


def test_a_node_on_one_address_is_reached_there_and_the_lack_of_what_was_asked_for_is_told(three) -> None:
    a, b, _ = three
    cluster = Cluster(three, (a.address, b.address), transport="thunderbolt")
    try:
        agreed = loading.agree_paths(cluster.router, cluster.members, LAYOUT.edges())
        assert [str(path.address) for path in agreed[0, 1]] == [f"{b.address}:9000"]
        order = LoadOrder(
            id="l", instance="i", model="", layout=LAYOUT, members=cluster.members, dtype="auto", step_s=1, paths=agreed
        )
        reason = f"Thunderbolt was asked for; Thunderbolt: n1 listens on {b.address}, not on tb0"
        assert loading.path_warnings(order) == [f"n0 and n1: wired eth0; network 10.77.0.0/24; {reason}"]
    finally:
        cluster.router.close()


def test_the_agreed_way_is_open_to_a_member_that_is_known_elsewhere(three, tiny) -> None:
    """n1 knows n0 at the wired address, by a lasting connection and by its configuration; the cable is taken anyway."""
    a, b, _ = three
    peers = {"n0": f"{a.address}:9000", "n1": f"{b.address}:9000"}
    sources = {"n0": [a.address], "n1": [b.address]}
    cluster = Cluster(three, ("0.0.0.0", "0.0.0.0"), peers=peers, sources=sources)
    try:
        assert until(lambda: cluster.status("n1")["peers"]["n0"]["state"] == "alive", 20)
        order = cluster.load(tiny)
        assert cluster.link("n0", "n1")["path"] == "Thunderbolt tb0"
        assert cluster.link("n1", "n0")["path"] == "Thunderbolt tb0"
        assert order.sources(1) == {"n0": {a.address, a.addresses["tb0"]}}
    finally:
        cluster.router.close()
