"""What each kind of host can do, and the advice its owner gets."""

from __future__ import annotations

import pytest

from mlxcel_nb.cluster.places import Interface
from mlxcel_nb.cluster.transports import HostFacts, advise


def bridge(*addresses, name="bridge0", up=True):
    return Interface(name=name, kind="thunderbolt", addresses=addresses, up=up)


EN0 = Interface(name="en0", kind="wired", addresses=("192.168.1.2/24",))
MAC = {"system": "Darwin", "release": (26, 3), "cable": True, "rdma": "off"}
ADDRESS = "Give bridge0 an address: System Settings, Network, Thunderbolt Bridge, TCP/IP."
RECOVERY = "Turn RDMA on: in macOS Recovery, Terminal, rdma_ctl enable."
READY, BARE = (EN0, bridge("10.1.0.1/24")), (EN0, bridge())

TABLE = {
    "TB4": (HostFacts(**MAC, thunderbolt=3, interfaces=READY), "thunderbolt", []),
    "TB4 without an address": (HostFacts(**MAC, thunderbolt=3, interfaces=BARE), "tcp", [ADDRESS]),
    "TB4, nothing plugged in": (HostFacts(**{**MAC, "cable": False}, thunderbolt=3, interfaces=BARE), "tcp", []),
    "TB5, RDMA off": (HostFacts(**MAC, thunderbolt=5, interfaces=READY), "thunderbolt", [RECOVERY]),
    "TB5, RDMA off, no address": (HostFacts(**MAC, thunderbolt=5, interfaces=BARE), "tcp", [ADDRESS, RECOVERY]),
    "TB5, older macOS": (
        HostFacts(**{**MAC, "release": (15, 7), "rdma": ""}, thunderbolt=5, interfaces=READY),
        "thunderbolt",
        ["RDMA over Thunderbolt comes with macOS 26.2."],
    ),
    "TB5, RDMA on": (
        HostFacts(**{**MAC, "rdma": "on"}, thunderbolt=5, rdma_devices=("rdma_en2",), interfaces=READY),
        "rdma",
        [],
    ),
    "a Mac without": (HostFacts(**{**MAC, "cable": False}, interfaces=(EN0,)), "tcp", []),
    "Linux": (HostFacts(system="Linux", driver=False, interfaces=(EN0,)), "tcp", []),
    "Linux, a host plugged in, no driver": (
        HostFacts(system="Linux", thunderbolt=3, cable=True, driver=False, interfaces=(EN0,)),
        "tcp",
        ["Load the driver: modprobe thunderbolt-net"],
    ),
    "Linux, a port that leads nowhere": (HostFacts(system="Linux", thunderbolt=3, driver=False), "tcp", []),
    "Linux, no address": (
        HostFacts(system="Linux", thunderbolt=3, cable=True, interfaces=(bridge(name="thunderbolt0"),)),
        "tcp",
        ["Give thunderbolt0 an address: ip addr add 10.55.0.1/24 dev thunderbolt0, and ip link set it up."],
    ),
    "Linux, thunderbolt-net": (
        HostFacts(system="Linux", thunderbolt=3, cable=True, interfaces=(bridge("10.1.0.1/24", name="thunderbolt0"),)),
        "thunderbolt",
        [],
    ),
    "Linux, InfiniBand": (HostFacts(system="Linux", rdma="on", rdma_devices=("mlx5_0",), driver=False), "rdma", []),
}


@pytest.mark.parametrize("row", TABLE)
def test_transport_and_advice_of_each_kind_of_host(row) -> None:
    """Case 62."""
    host, transport, advice = TABLE[row]
    found = advise(host)
    assert (found.transport, list(found.advice)) == (transport, advice)
    assert found.reason


def test_no_advice_names_hardware_that_is_not_there() -> None:
    """Case 62."""
    for host, _, _ in TABLE.values():
        words = " ".join(advise(host).advice)
        if not host.thunderbolt:
            assert not words
        if host.thunderbolt < 5:
            assert "RDMA" not in words
        assert "cable" not in words and "buy" not in words


def test_the_thunderbolt_bit_is_for_an_interface_with_an_address() -> None:
    assert HostFacts(system="Darwin", thunderbolt=5, interfaces=READY).bits == 0b11
    assert HostFacts(system="Darwin", thunderbolt=5, interfaces=BARE).bits == 0b01
    assert HostFacts(system="Darwin", thunderbolt=3, interfaces=(bridge("10.1.0.1/24", up=False),)).bits == 0b01
    assert HostFacts(system="Linux").bits == 0b01
