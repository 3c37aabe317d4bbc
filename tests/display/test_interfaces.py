"""What a host is connected to, as a table and for other programs."""

from __future__ import annotations

import json

from mlxcel_nb.cluster.places import Interface
from mlxcel_nb.cluster.transports import HostFacts
from mlxcel_nb.display.interfaces import interfaces_view, to_dict

HOST = HostFacts(
    system="Darwin",
    release=(26, 3),
    thunderbolt=5,
    cable=True,
    rdma="off",
    interfaces=(
        Interface(name="lo0", kind="loopback", addresses=("127.0.0.1/8",)),
        Interface(name="en0", kind="wired", addresses=("192.168.1.2/24",), speed_bps=10_000_000_000, mtu=1500),
        Interface(name="bridge0", kind="thunderbolt", up=False),
    ),
    missing=("ifconfig: no answer",),
)


def test_the_preferred_interface_comes_first_and_advice_follows() -> None:
    text = interfaces_view(HOST).text
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["bridge0", "en0", "lo0"]
    assert lines[2].split()[1:3] == ["Thunderbolt", "down"]
    assert "10 Gbit/s" in lines[3]
    assert "Links at best: tcp: Thunderbolt, but without an address." in text
    assert "Give bridge0 an address" in text and "rdma_ctl enable" in text
    assert "Not asked: ifconfig: no answer." in text
    told = json.loads(json.dumps(to_dict(HOST)))
    assert told["transport"] == "tcp" and len(told["advice"]) == 2
    assert told["interfaces"][0] == {
        "name": "bridge0",
        "kind": "thunderbolt",
        "up": False,
        "addresses": [],
        "speed_bps": None,
        "mtu": None,
    }
