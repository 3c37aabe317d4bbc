"""A node that is told to measure: who may say so, and what comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxcel_nb.net.measuring.pair import Measured
from tests.net.helpers import run
from tests.runtime.nodes import answer, linked, running

ORDER: dict[str, Any] = {"type": "measure", "id": "m1", "node": "b", "pings": 3, "seconds": 0.05}


@pytest.mark.parametrize("role", ["router", "visitor"])
def test_a_router_or_a_visitor_gets_the_figures_of_one_way(role: str) -> None:
    with running("a") as a, running("b") as b:

        async def body() -> None:
            async with linked(a, "asker", role) as asker:
                reply = await answer(asker, {**ORDER, "addresses": [str(b._address)]})
            assert (reply["type"], reply["id"]) == ("reply", "m1")
            assert reply["used"] == ["127.0.0.1", "127.0.0.1"]
            measured = Measured.from_dict(reply["measured"])
            assert measured.pings == 3 and measured.bytes_per_s > 0 and measured.rtt_s > 0

        run(body(), 40)


def test_nobody_else_may_and_bent_orders_are_refused() -> None:
    with running("a") as a:

        async def body() -> None:
            async with linked(a, "other", "hybrid") as other:
                reply = await answer(other, {**ORDER, "addresses": []})
                assert "may not order" in reply["error"]["cause"]
            async with linked(a, "asker", "visitor") as asker:
                for bent in (
                    {"addresses": "10.0.0.1:1"}, {"addresses": ["nonsense"]}, {"node": 3}, {"pings": 0},
                    {"seconds": float("nan")}, {"seconds": -1}, {"seconds": 1e9},
                ):  # fmt: skip
                    reply = await answer(asker, {**ORDER, "addresses": ["127.0.0.1:9"], **bent})
                    assert (reply["type"], reply["error"]["code"]) == ("error", "wire"), bent

        run(body(), 40)


def test_a_way_that_leads_nowhere_or_to_somebody_else_is_an_error_with_its_reason() -> None:
    with running("a") as a, running("b") as b:

        async def body() -> None:
            async with linked(a, "asker", "visitor") as asker:
                reply = await answer(asker, {**ORDER, "addresses": ["127.0.0.1:9"]})
                assert "offline" in reply["error"]["cause"]
                reply = await answer(asker, {**ORDER, "node": "c", "addresses": [str(b._address)]})
                assert reply["type"] == "error" and "b" in reply["error"]["cause"], reply
                reply = await answer(asker, {**ORDER, "addresses": []})
                assert "no address" in reply["error"]["cause"]
                reply = await answer(asker, {**ORDER, "addresses": ["127.0.0.1:9", str(b._address)]})
                assert reply["type"] == "reply"  # the second one works

        run(body(), 40)


def test_a_measurement_ends_when_the_one_who_asked_has_left() -> None:
    with running("a") as a, running("b") as b:

        async def body() -> None:
            order = {**ORDER, "addresses": [str(b._address)]}
            async with linked(a, "asker", "visitor") as asker:
                asker.link.send({**order, "seconds": 10.0})
                assert (await answer(asker, {**order, "id": "m2"}))["error"]["code"] == "busy"
            async with linked(a, "next", "visitor") as another:
                async with asyncio.timeout(30):
                    while (await answer(another, order))["type"] == "error":
                        await asyncio.sleep(0.05)

        run(body(), 40)


def test_one_measurement_at_a_time_and_a_node_that_stops_ends_it() -> None:
    with running("b") as b:

        async def body() -> None:
            with running("a") as a:
                async with linked(a, "asker", "visitor") as asker:
                    order = {**ORDER, "addresses": [str(b._address)], "seconds": 8.0}
                    asker.link.send(order)
                    reply = await answer(asker, {**order, "id": "m2"})
                    assert (reply["id"], reply["error"]["code"]) == ("m2", "busy")

        run(body(), 40)
