"""All members know the secret; still each is obeyed only where its role and its connection say so."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.errors import HandshakeError, Refused, WireError, from_dict
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.net.hot import controls
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.opening import MAX_FIRST_BYTES
from mlxcel_nb.runtime import requests as requests_module
from mlxcel_nb.runtime.commands import Unload
from mlxcel_nb.runtime.node import Node
from mlxcel_nb.runtime.node_config import NodeConfig
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder, Member, OpenOrder
from tests.net.helpers import SECRET, Heard, hot_pair, identity, read_all, run
from tests.runtime.nodes import answer, linked, running
from tests.tiny import make_tiny

LONG = SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A whole node in this process."""
    with running("engine-0") as made:
        yield made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


def load_order(tiny: Path, *members: str) -> LoadOrder:
    return LoadOrder(
        id="load-1",
        instance="instance-1",
        model=str(tiny),
        layout=make_layout(5, pp=len(members)),
        members=tuple(Member(node_id=name, address="127.0.0.1:1") for name in members),
        dtype="auto",
        step_s=10.0,
    )


@contextlib.asynccontextmanager
async def loaded(node: Node, tiny: Path) -> AsyncIterator[Heard]:
    """A router whose model the node holds."""
    async with linked(node, "router-00000001", "router") as router:
        router.link.send(load_order(tiny, "engine-0").to_dict())
        while (message := await router.messages.get())["type"] == "progress":
            pass
        assert message["type"] == "loaded", message
        opening = OpenOrder(id="open-1", instance="instance-1", rooms=(None,)).to_dict()
        assert (await answer(router, opening))["type"] == "reply"
        try:
            yield router
        finally:
            assert (await answer(router, {"type": "unload", "id": "unload-1"}))["type"] == "reply"


def generate(request_id: str, **prompt: Any) -> dict[str, Any]:
    return GenerateOrder(id=request_id, instance="instance-1", params=LONG, **(prompt or {"prompt": "hi"})).to_dict()


@pytest.mark.parametrize("kind", ["load", "unload", "generate", "cancel", "abort", "failed", "step", None])
def test_a_member_that_is_no_router_gives_no_orders(node: Node, tiny: Path, kind: str | None) -> None:
    async def case() -> None:
        async with linked(node, "engine-7", "hybrid") as stranger:
            order = {**load_order(tiny, "engine-0").to_dict(), "epoch": 1, "error": {}, "type": kind}
            if kind == "generate":
                stranger.link.send(generate("r"))
                refusal = await stranger.streamed.get()
            else:
                refusal = await answer(stranger, order)
            assert "may not send" in refusal["error"]["cause"]
            assert node.status()["model"] is None and node.status()["activity"] == "idle"

    run(case())


def test_only_its_own_router_ends_a_request(node: Node, tiny: Path) -> None:
    async def case() -> None:
        async with loaded(node, tiny) as router, linked(node, "router-00000002", "router") as other:
            router.link.send(generate("theirs"))
            assert (await router.streamed.get())["type"] == "delta"
            other.link.send({"type": "cancel", "id": "theirs"})
            await answer(other, {"type": "status", "id": "later"})  # by now the cancel has been read
            assert node.status()["requests"] == 1
            router.link.send({"type": "cancel", "id": "theirs"})
            while (message := await router.streamed.get())["type"] != "end":
                pass
            assert message["finish_reason"] == "cancelled"
            assert other.streamed.empty()

    run(case())


@pytest.mark.parametrize("kind", ["abort", "failed"])
def test_an_abort_counts_only_on_a_link_that_was_made_for_the_instance(node: Node, tiny: Path, kind: str) -> None:
    """To be an engine of the cluster is not enough, and the name of this one, the leader, is nobody else's."""

    async def case() -> None:
        async with loaded(node, tiny) as router, linked(node, "engine-7", "hybrid") as pretender:
            with pytest.raises(Refused, match="engine-0 is the id of this node itself"):
                async with linked(node, "engine-0", "hybrid"):
                    pass
            router.link.send(generate("long"))
            assert (await router.streamed.get())["type"] == "delta"
            refusal = await answer(pretender, {"type": kind, "epoch": 1, "step": -1, "error": {"cause": "mischief"}})
            assert "may not send" in refusal["error"]["cause"]
            assert node.status()["requests"] == 1
            router.link.send({"type": "cancel", "id": "long"})
            while (message := await router.streamed.get())["type"] != "end":
                pass
            assert message["finish_reason"] == "cancelled"

    run(case())


def test_a_refusal_is_not_answered(node: Node) -> None:
    async def case() -> None:
        async with linked(node, "engine-7", "hybrid") as peer:
            peer.link.send({"type": "error", "id": None, "error": {"cause": "no"}})
            assert (await answer(peer, {"type": "status", "id": "s"}))["type"] == "reply"

    run(case())


def test_an_order_without_a_place_for_the_node_leaves_it_free(node: Node, tiny: Path) -> None:
    async def case() -> None:
        async with linked(node, "router-00000001", "router") as router:
            refusal = await answer(router, load_order(tiny, "engine-5", "engine-6").to_dict())
            assert "engine-0 is not a member" in refusal["error"]["cause"]
        async with loaded(node, tiny):
            assert node.status()["model"] is not None

    run(case())


def test_waiting_prompts_are_bounded_in_size(node: Node, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "MAX_WEIGHT", 1000)

    async def case() -> None:
        async with loaded(node, tiny) as router:
            router.link.send(generate("large", prompt="x" * 900))
            router.link.send(generate("small", prompt="x" * 90))
            router.link.send(generate("one more", prompt="x" * 90))
            while (message := await router.streamed.get())["type"] != "end":
                pass
            assert (message["id"], message["error"]["code"]) == ("one more", "busy")

    run(case())


def test_orders_for_a_node_whose_thread_has_ended_are_refused_at_once(tiny: Path) -> None:
    async def case() -> None:
        made = Node(NodeConfig(cluster="test", node_id="engine-0", orphan_guard=False), Secrets(SECRET))
        await asyncio.to_thread(made.start)
        try:
            async with linked(made, "router-00000001", "router") as router:
                made._worker.post(Unload(lambda: sys.exit("struck")))
                router.link.send(load_order(tiny, "engine-0").to_dict())
                for order in (None, load_order(tiny, "engine-0").to_dict(), {"type": "unload", "id": "u"}):
                    refusal = await (answer(router, order) if order else router.messages.get())
                    assert "struck" in refusal["error"]["cause"], refusal
        finally:
            await asyncio.to_thread(made.stop)

    run(case())


def test_a_first_message_is_small() -> None:
    async def case() -> None:
        made = Node(NodeConfig(cluster="test", node_id="engine-1", orphan_guard=False), Secrets(SECRET))
        address: Address = await asyncio.to_thread(made.start)
        try:
            # The listener says its own first message before it reads ours, so the dial itself may succeed.
            with contextlib.suppress(HandshakeError):
                link = await dial(identity("x"), SECRET, address, hello={"link": "hot", "x": "i" * MAX_FIRST_BYTES})
                with contextlib.closing(link):
                    await read_all(link.sock)
            assert made._rendezvous._futures == {}
        finally:
            await asyncio.to_thread(made.stop)

    run(case())


def test_messages_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that talks and talks where a tensor is due."""
    monkeypatch.setattr(controls, "MAX_BYTES", 100_000)
    with hot_pair() as (talker, listener):
        with contextlib.suppress(Exception):
            for _ in range(100):
                talker.send_control({"type": "step", "filler": "x" * 2000}, deadline=None)
        with pytest.raises(WireError, match="more messages than can be kept"):
            while True:
                listener.absorb()


def test_what_an_error_of_a_peer_says_cannot_move_the_cursor() -> None:
    error = from_dict({"code": "model", "cause": "\x1b[2J\rall is well\nTraceback", "node": "engine-0\x07"})
    assert str(error) == "engine-0 :  [2J all is well Traceback"
