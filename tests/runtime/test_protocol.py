"""The runtime's messages survive the wire and refuse what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.layout import make_layout
from mlxcel_nb.cluster.paths import Path
from mlxcel_nb.errors import ConfigError, MlxcelError, RequestError, WireError
from mlxcel_nb.models.params import SamplingParams
from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.plan.facts import Growth
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder, Member, OpenOrder
from mlxcel_nb.wire.messages import pack, unpack


def load_order(**changes: Any) -> LoadOrder:
    facts: dict[str, Any] = {
        "id": "a",
        "instance": "i",
        "model": "/models/x",
        "layout": make_layout(30, pp=2),
        "members": (Member(node_id="n0", address="127.0.0.1:1"), Member(node_id="n1", address="[::1]:2")),
        "dtype": "auto",
        "step_s": 30.0,
    }
    return LoadOrder(**{**facts, **changes})


def test_orders_survive_the_wire() -> None:
    load = load_order()
    assert LoadOrder.from_dict(unpack(pack(load.to_dict()))) == load
    ask = GenerateOrder(id="r", instance="i", params=SamplingParams(stop=("\n\n",), seed=7), prompt="$x {y} 🙂")
    assert GenerateOrder.from_dict(unpack(pack(ask.to_dict()))) == ask
    two = SamplingParams(max_tokens=2)
    ask = GenerateOrder(id="r", instance="i", params=two, token_ids=[1], forced=[2, 3])
    assert GenerateOrder.from_dict(unpack(pack(ask.to_dict()))) == ask
    opening = OpenOrder(id="o", instance="i", rooms=(Room({Growth(8): 2}, 4096), None))
    assert OpenOrder.from_dict(unpack(pack(opening.to_dict()))) == opening


def test_agreed_ways_travel_and_name_whence_a_member_comes() -> None:
    path = Path(
        address=Address("10.1.0.2", 9000),
        kind="thunderbolt",
        interface="tb0",
        peer_interface="bridge0",
        reason="network 10.1.0.0/24",
        source="10.1.0.1",
    )
    load = load_order(paths={(0, 1): (path,)})
    again = LoadOrder.from_dict(unpack(pack(load.to_dict())))
    assert again == load
    assert again.ways(0, 1) == (path,)
    assert again.sources(1) == {"n0": {"10.1.0.1"}}
    assert again.sources(0) == {}
    assert [str(way.address) for way in load_order().ways(0, 1)] == ["[::1]:2"]


def test_a_member_finds_its_place_and_a_stranger_does_not() -> None:
    assert load_order().place("n1") == 1
    with pytest.raises(WireError, match="n9"):
        load_order().place("n9")


@pytest.mark.parametrize(
    "change",
    [
        {"paths": 3},
        {"paths": [[0, 1, [["x"]]]]},
        {"members": [["n0", "127.0.0.1:1"]]},
        {"layout": {}},
        {"id": 3},
        {"step_s": "soon"},
        {"members": None},
    ],
)
def test_a_bent_load_order_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((WireError, ConfigError)):
        LoadOrder.from_dict({**load_order().to_dict(), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": 3},
        {"prompt": "x", "messages": []},
        {"params": {"temprature": 1}},
        {"params": {"stop": [""]}},
        {"params": {"max_tokens": -1}},
        {"token_ids": [1, "2"], "prompt": None},
        {"token_ids": [-1]},
        {"forced": [-1]},
        {"forced": "abc"},
        {"forced": [1], "params": {"max_tokens": 2}},
    ],
)
def test_a_bent_request_is_refused(change: dict[str, Any]) -> None:
    good = GenerateOrder(id="r", instance="i", params=SamplingParams(), prompt="x").to_dict()
    if "token_ids" in change:
        good.pop("prompt")
        change = {k: v for k, v in change.items() if v is not None}
    with pytest.raises(MlxcelError):
        GenerateOrder.from_dict({**good, **change})


def test_a_request_is_one_of_prompt_messages_and_ids() -> None:
    with pytest.raises(RequestError):
        GenerateOrder(id="r", instance="i", params=SamplingParams())
