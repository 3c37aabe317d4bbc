"""What a host's hardware and settings let a link be, and what its owner can do for a faster one. Pure.

| host | transport | advice |
|---|---|---|
| Thunderbolt 5, RDMA on | rdma | none |
| Thunderbolt 5, RDMA off, macOS 26.2 or later | thunderbolt, or tcp without an address | turn RDMA on |
| Thunderbolt 5, an older macOS | likewise | RDMA comes with macOS 26.2 |
| Thunderbolt 3 or 4 | thunderbolt, or tcp without an address | an address, where a cable is plugged in |
| Linux with thunderbolt-net | likewise | likewise; loading the driver where a controller waits for it |
| Linux with an RDMA adapter | rdma | none |
| none of these | tcp | none |

No advice names hardware that the host does not have: a cable or a port is not something one can switch on. Which
Macs can do RDMA, and how it is turned on, is Apple's TN3205.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxcel_nb.cluster.places import THUNDERBOLT, Interface

RDMA_SINCE = (26, 2)
"""The first macOS with RDMA over Thunderbolt."""

TCP_BIT, THUNDERBOLT_BIT, RDMA_BIT = 1, 2, 4
"""Of the `transports` byte in a hello."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What the probe found on one host.

    Args:
        system: "Darwin" or "Linux", as `platform.system()` has it.
        release: of macOS, as (26, 2); () elsewhere.
        interfaces: all of them, those without an address too.
        thunderbolt: 5 where a port is that fast, 3 for Thunderbolt 3, 4 and USB4, 0 for none.
        cable: something is plugged into a Thunderbolt port that speaks for a host.
        driver: whether the networking driver is loaded; always on macOS.
        rdma: "on", "off", or "" where there is none.
        rdma_devices: their names, as `ibv_devices` has them.
        missing: what could not be asked, and why.
    """

    system: str
    release: tuple[int, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    thunderbolt: int = 0
    cable: bool = False
    driver: bool = True
    rdma: str = ""
    rdma_devices: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def thunderbolt_ready(self) -> bool:
        """Whether a Thunderbolt interface is up and has an address."""
        return any(i.kind == THUNDERBOLT and i.up and i.addresses for i in self.interfaces)

    @property
    def bits(self) -> int:
        """The `transports` byte of this host's hellos, RDMA aside: that is for whoever opens a device."""
        return TCP_BIT | (THUNDERBOLT_BIT if self.thunderbolt_ready else 0)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The best transport of a host, and what would make it better."""

    transport: str
    reason: str
    advice: tuple[str, ...] = ()


def advise(host: HostFacts) -> Advice:
    """The row of the table above that `host` is in."""
    advice = []
    ready = host.thunderbolt_ready
    if host.thunderbolt and not ready:
        advice += _address_advice(host)
    if host.rdma == "on" and host.rdma_devices:
        return Advice(transport="rdma", reason=f"RDMA on {', '.join(host.rdma_devices)}", advice=tuple(advice))
    if host.system == "Darwin" and host.thunderbolt >= 5:
        advice += _rdma_advice(host)
    if ready:
        named = _names(i for i in host.interfaces if i.kind == THUNDERBOLT and i.up and i.addresses)
        return Advice(transport="thunderbolt", reason=f"{named} has an address", advice=tuple(advice))
    return Advice(transport="tcp", reason=_no_thunderbolt(host), advice=tuple(advice))


def _address_advice(host: HostFacts) -> list[str]:
    if host.system == "Linux" and not host.driver:
        return ["Load the driver: modprobe thunderbolt-net"] if host.cable else []
    idle = [i for i in host.interfaces if i.kind == THUNDERBOLT and not i.addresses]
    if not host.cable or not idle:
        return []
    if host.system == "Darwin":
        bridge = next((i for i in idle if i.name.startswith("bridge")), idle[0])
        return [f"Give {bridge.name} an address: System Settings, Network, Thunderbolt Bridge, TCP/IP."]
    return [f"Give {idle[0].name} an address: ip addr add 10.55.0.1/24 dev {idle[0].name}, and ip link set it up."]


def _rdma_advice(host: HostFacts) -> list[str]:
    if host.release and host.release < RDMA_SINCE:
        return [f"RDMA over Thunderbolt comes with macOS {'.'.join(map(str, RDMA_SINCE))}."]
    if host.rdma == "off":
        return ["Turn RDMA on: in macOS Recovery, Terminal, rdma_ctl enable."]
    return []


def _no_thunderbolt(host: HostFacts) -> str:
    if not host.thunderbolt:
        return "no Thunderbolt"
    if not host.cable:
        return "Thunderbolt, but no host is plugged into it"
    if not host.driver:
        return "Thunderbolt, but its networking driver is not loaded"
    if any(i.kind == THUNDERBOLT and i.addresses for i in host.interfaces):
        return "Thunderbolt, but its interface is down"
    return "Thunderbolt, but without an address"


def _names(interfaces: Iterable[Interface]) -> str:
    return ", ".join(i.name for i in interfaces)
