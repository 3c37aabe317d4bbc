"""A node keeps connections to its peers and says in its status who lives, since when, and why not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil
import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import Change, State
from mlxcel_nb.cluster.secret import Secret, Secrets
from mlxcel_nb.errors import AuthenticationFailed
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.runtime.node import Node
from mlxcel_nb.runtime.node_config import NodeConfig
from tests.launch.bare_nodes import free_ports
from tests.net.helpers import OTHER_SECRET, SECRET, identity, run
from tests.runtime.nodes import answer, linked
from tests.waiting import until

WAIT_S = 20.0


def ports(*names: str) -> dict[str, int]:
    """One for each: nodes that know each other beforehand need fixed ones."""
    return dict(zip(names, free_ports(len(names)), strict=True))


@contextlib.contextmanager
def node(
    node_id: str,
    port: int = 0,
    peers: Mapping[str, int] | None = None,
    secrets: Sequence[Secret] = (SECRET,),
    changes: list[Change] | None = None,
) -> Iterator[Node]:
    config = NodeConfig(
        cluster="test",
        node_id=node_id,
        port=port,
        orphan_guard=False,
        peers={peer: [Address("127.0.0.1", port)] for peer, port in (peers or {}).items()},
    )
    made = Node(config, Secrets(*secrets), on_change=None if changes is None else changes.append)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def peer(node: Node, node_id: str) -> dict[str, Any]:
    found: dict[str, Any] = node.status()["peers"][node_id]
    return found


def test_status_tells_state_reason_incarnation_and_path_of_every_peer() -> None:
    at = ports("a", "b", "c")
    with node("a", at["a"], {"b": at["b"], "c": at["c"]}) as a, node("b", at["b"], {"a": at["a"]}):
        assert until(lambda: peer(a, "b")["state"] == "alive", WAIT_S)
        found = peer(a, "b")
        assert found["link"]["address"].startswith("127.0.0.1:") and found["link"]["cipher"] == "aes-256-gcm"
        assert len(found["incarnation"]) == 32 and found["reason"] == "" and found["since_s"] >= 0
        assert until(lambda: "offline" in peer(a, "c")["reason"], WAIT_S)
        assert (peer(a, "c")["state"], peer(a, "c")["link"]) == ("unseen", None)


def test_status_travels_to_whoever_asks() -> None:
    at = ports("a", "b")

    async def case(a: Node) -> None:
        async with linked(a, "router-00000001", "router") as router:
            told = (await answer(router, {"type": "status", "id": "s"}))["status"]["peers"]["b"]
            assert told["state"] == "alive"

    with node("a", at["a"], {"b": at["b"]}) as a, node("b", at["b"], {"a": at["a"]}):
        assert until(lambda: peer(a, "b")["state"] == "alive", WAIT_S)
        run(case(a))


def test_changes_are_told_as_they_happen() -> None:
    at = ports("a", "b")
    changes: list[Change] = []
    with node("a", at["a"], {"b": at["b"]}, changes=changes):
        for _ in range(2):
            with node("b", at["b"], {"a": at["a"]}):
                assert until(lambda: changes and changes[-1].state is State.ALIVE, WAIT_S)
            assert until(lambda: changes[-1].state is State.DEAD, WAIT_S)
    assert [change.state for change in changes] == [State.ALIVE, State.DEAD] * 2
    assert [change.restarted for change in changes] == [False, False, True, False]
    assert all(change.reason for change in changes if change.state is State.DEAD)


def test_nodes_that_come_and_go_leave_nothing_behind() -> None:
    """Case 35, for nodes: whoever stays is as large as before, and in touch with each newcomer at once."""
    at = ports("a", "b")
    me = psutil.Process()
    with node("a", at["a"], {"b": at["b"]}) as a:
        base: tuple[int, int, int] | None = None
        for round_ in range(8):
            with node("b", at["b"], {"a": at["a"]}):
                assert until(lambda: peer(a, "b")["state"] == "alive", WAIT_S)
            assert until(lambda: peer(a, "b")["state"] == "dead", WAIT_S)
            gc.collect()
            now = me.memory_info().rss, me.num_fds(), me.num_threads()
            if round_ == 2:  # what is allocated once has been by now
                base = now
        assert base is not None
        assert now[0] - base[0] < 8 << 20, (base, now)
        assert now[1] <= base[1] + 2 and now[2] <= base[2] + 2, (base, now)


def test_a_secret_is_changed_node_by_node() -> None:
    """Case 50: restarted one after the other with both secrets, then with the new one alone."""
    at = ports("a", "b")

    def alive(a: Node, b: Node) -> bool:
        return peer(a, "b")["state"] == peer(b, "a")["state"] == "alive"

    def start(node_id: str, *secrets: Secret) -> contextlib.AbstractContextManager[Node]:
        other = "b" if node_id == "a" else "a"
        return node(node_id, at[node_id], {other: at[other]}, secrets)

    with start("a", SECRET) as a:
        with start("b", SECRET) as b:
            assert until(lambda: alive(a, b), WAIT_S)
        with start("b", OTHER_SECRET, SECRET) as b:  # the lower id still dials with the old one, and is let in
            assert until(lambda: alive(a, b), WAIT_S)
    with start("b", OTHER_SECRET, SECRET) as b, start("a", OTHER_SECRET, SECRET) as a:
        assert until(lambda: alive(a, b), WAIT_S)
        run(visit(a, SECRET))
    with start("b", OTHER_SECRET) as b, start("a", OTHER_SECRET) as a:
        assert until(lambda: alive(a, b), WAIT_S)
        with pytest.raises(AuthenticationFailed, match="authentication failed with host"):
            run(visit(a, SECRET))


def test_a_secret_is_changed_while_nodes_run() -> None:
    """Case 50: every connection made from then on uses the new one, and those that stand are not touched."""
    at = ports("a", "b")
    with node("a", at["a"], {"b": at["b"]}) as a, node("b", at["b"], {"a": at["a"]}) as b:
        assert until(lambda: peer(a, "b")["state"] == peer(b, "a")["state"] == "alive", WAIT_S)
        ages = peer(a, "b")["link"]["age_s"]
        for each in (b, a):
            each.use_secrets(Secrets(OTHER_SECRET, SECRET))
            for known in (SECRET, OTHER_SECRET):
                run(visit(each, known))
        run(measured(a, at["b"]))
        for each in (a, b):
            each.use_secrets(Secrets(OTHER_SECRET))
            with pytest.raises(AuthenticationFailed, match="authentication failed with host"):
                run(visit(each, SECRET))
        run(measured(a, at["b"]))
        assert peer(a, "b")["state"] == "alive" and peer(a, "b")["link"]["age_s"] > ages


async def measured(node: Node, port: int) -> None:
    """`node` measures its way to its peer, by a connection of its own."""
    order = {"node": "b", "addresses": [f"127.0.0.1:{port}"], "pings": 1, "seconds": 0.01}
    async with linked(node, "router-00000001", "router", secret=OTHER_SECRET) as router:
        assert "measured" in await answer(router, {"type": "measure", "id": "m", **order})


async def visit(node: Node, secret: Secret) -> None:
    """Somebody comes and goes."""
    assert node._address is not None
    (await dial(identity("visitor"), secret, node._address)).close()
    await asyncio.sleep(0)


def test_a_peer_with_another_secret_is_told_apart_from_one_that_is_off(caplog: pytest.LogCaptureFixture) -> None:
    """Case 50: on both ends."""
    at = ports("a", "b", "c")
    with (
        node("a", at["a"], {"b": at["b"], "c": at["c"]}) as a,
        node("b", at["b"], {"a": at["a"]}, (OTHER_SECRET,)) as b,
    ):
        assert until(lambda: "authentication failed with host" in peer(a, "b")["reason"], WAIT_S)
        assert until(lambda: "authentication failed with host" in peer(b, "a")["reason"], WAIT_S)
        assert until(lambda: "offline" in peer(a, "c")["reason"], WAIT_S)
    assert "authentication failed with host 127.0.0.1" in caplog.text


def test_a_peer_with_another_suite_is_refused_with_both_named() -> None:
    """Case 51."""
    at = ports("a", "b")
    config = NodeConfig(
        cluster="test",
        node_id="a",
        port=at["a"],
        orphan_guard=False,
        suite="chacha20-poly1305",
        peers={"b": [Address("127.0.0.1", at["b"])]},
    )
    made = Node(config, Secrets(SECRET))
    made.start()
    try:
        with node("b", at["b"]):
            assert until(lambda: "uses" in peer(made, "b")["reason"], WAIT_S)
            reason = peer(made, "b")["reason"]
            assert "aes-256-gcm" in reason and "chacha20-poly1305" in reason
    finally:
        made.stop()
