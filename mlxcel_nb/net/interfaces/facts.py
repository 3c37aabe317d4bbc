"""What the operating systems say of network interfaces, read and judged. Pure: text and numbers in, facts out.

`net/interfaces/probe.py` asks; this module understands the answers, which come from programs and files of the system
and are of no fixed form: whatever cannot be read counts as not said. Nothing here was run on Thunderbolt hardware: the
forms are those of the documents named at each function, and tests hold them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxcel_nb.cluster.places import LOOPBACK, OTHER, PREFERENCE, THUNDERBOLT, VIRTUAL, VPN, WIFI, WIRED

MEGA, GIGA = 1_000_000, 1_000_000_000

# ------------------------------------------------------------------------------------------ Linux

_ARPHRD_ETHER, _ARPHRD_INFINIBAND, _ARPHRD_PPP, _ARPHRD_LOOPBACK, _ARPHRD_NONE = 1, 32, 512, 772, 65534
_ARPHRD_TUNNELS = frozenset({768, 769, 776, 778, 823})  # IPIP, IP6IP6, SIT, GRE, GRE6
_IFF_TUN = 0x1


@dataclass(frozen=True, kw_only=True)
class LinuxLink:
    """An entry of /sys/class/net, as `Documentation/ABI/testing/sysfs-class-net` of the kernel describes it.

    Args:
        type: ARPHRD_* of linux/if_arp.h.
        driver: the name behind `device/driver`, else what ethtool says.
        devtype: DEVTYPE in `uevent`: "wlan", "bridge", "bond", "vlan", "wireguard"...
        wireless: whether there is a folder `wireless` or `phy80211`.
        tun_flags: of a tun or tap device, else None.
        below: interfaces it stands on: members of a bridge, slaves of a bond, the carrier of a VLAN.
        speed_mbit: `speed`; -1 or 0 where the driver does not know.
        lane_speed: "20.0 Gb/s", `rx_speed` of the Thunderbolt peer that it leads to.
        lanes: `rx_lanes` beside it.
    """

    name: str
    type: int = _ARPHRD_ETHER
    driver: str = ""
    devtype: str = ""
    wireless: bool = False
    tun_flags: int | None = None
    below: tuple[str, ...] = ()
    speed_mbit: int = 0
    lane_speed: str = ""
    lanes: int = 0


def linux_kind(link: LinuxLink, links: Mapping[str, LinuxLink], depth: int = 4) -> str:
    """The kind of one interface among all.

    The driver of IP over Thunderbolt calls itself thunderbolt-net (drivers/net/thunderbolt). What stands on others is
    of the kind of the best of them; a bridge of veths and taps alone is virtual. A veth that is asked about is a
    container's way out.
    """
    if link.type == _ARPHRD_LOOPBACK:
        return LOOPBACK
    if link.driver == "thunderbolt-net":
        return THUNDERBOLT
    if link.wireless or link.devtype == "wlan":
        return WIFI
    if link.tun_flags is not None:
        return VPN if link.tun_flags & _IFF_TUN else VIRTUAL
    if link.devtype in ("wireguard", "ppp") or link.type in _ARPHRD_TUNNELS | {_ARPHRD_PPP, _ARPHRD_NONE}:
        return VPN
    if link.below or link.devtype in ("bridge", "bond") or link.driver == "bridge":
        under = [links[name] for name in link.below if name in links and name != link.name] if depth else []
        kinds = [linux_kind(each, links, depth - 1) for each in under if each.driver != "veth"]
        return min((kind for kind in kinds if kind in PREFERENCE), key=PREFERENCE.index, default=VIRTUAL)
    if link.driver in ("dummy", "ifb", "bridge", "openvswitch"):
        return VIRTUAL
    if link.type in (_ARPHRD_ETHER, _ARPHRD_INFINIBAND):
        return WIRED
    return OTHER


def linux_speed(link: LinuxLink, links: Mapping[str, LinuxLink]) -> int:
    """Bits a second, 0 where nobody says; of what stands on others the fastest of them."""
    if link.speed_mbit > 0:
        return link.speed_mbit * MEGA
    if link.lane_speed:
        return parse_speed(link.lane_speed) * max(1, link.lanes)
    return max((linux_speed(links[n], {}) for n in link.below if n in links and n != link.name), default=0)


def parse_speed(text: str) -> int:
    """Bits a second of "Up to 40 Gb/s", "20.0 Gb/s" or "480 Mb/s"; 0 when it is none."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*([GM])b/s", text)
    if found is None:
        return 0
    return int(float(found[1]) * (GIGA if found[2] == "G" else MEGA))


# ------------------------------------------------------------------------------------------ macOS


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Device to port of `networksetup -listallhardwareports`: {"en0": "Wi-Fi", "bridge0": "Thunderbolt Bridge"}."""
    ports: dict[str, str] = {}
    port = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "Hardware Port":
            port = value.strip()
        elif name == "Device" and port:
            ports[value.strip()] = port
            port = ""
    return ports


@dataclass(frozen=True, kw_only=True)
class MacLink:
    """A paragraph of `ifconfig`: what of it nobody else says."""

    name: str
    members: tuple[str, ...] = ()
    media: str = ""
    active: bool | None = None


def parse_ifconfig(text: str) -> dict[str, MacLink]:
    """Members, medium and status of each interface of macOS's `ifconfig` (ifconfig(8), "bridge" and "media")."""
    found: dict[str, MacLink] = {}
    for paragraph in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        head = re.match(r"(\w+): flags=", paragraph)
        if head is None:
            continue
        media = re.search(r"^\s+media: (.*)$", paragraph, re.MULTILINE)
        status = re.search(r"^\s+status: (\w+)", paragraph, re.MULTILINE)
        found[head[1]] = MacLink(
            name=head[1],
            members=tuple(re.findall(r"^\s+member: (\w+)", paragraph, re.MULTILINE)),
            media=media[1].strip() if media else "",
            active=None if status is None else status[1] == "active",
        )
    return found


def media_speed(media: str) -> int:
    """Bits a second of a medium such as "autoselect (10Gbase-T <full-duplex>)" or "autoselect (1000baseT)"."""
    found = re.search(r"(\d+)(G?)\s*base", media, re.IGNORECASE)
    if found is None:
        return 0
    return int(found[1]) * (GIGA if found[2] else MEGA)


@dataclass(frozen=True, kw_only=True)
class ThunderboltPort:
    """One receptacle of a Mac.

    Args:
        number: N of the hardware port "Thunderbolt N".
        host: a host is plugged into it, rather than a device or nothing.
    """

    number: str
    speed_bps: int
    connected: bool
    host: bool


def parse_thunderbolt(text: str) -> list[ThunderboltPort]:
    """The ports in `system_profiler SPThunderboltDataType -json`.

    A bus has `receptacle_1_tag` with `receptacle_id_key`, `receptacle_status_key` and `current_speed_key` ("Up to 80
    Gb/s"), and under `_items` what is plugged in; a host there has a `domain_uuid_key` of its own, which is how
    `mlx.distributed_config` tells as well.
    """
    try:
        buses = json.loads(text)["SPThunderboltDataType"]
    except (ValueError, KeyError, TypeError):
        return []
    return [port for bus in _maps(buses) for tag, told in bus.items() if (port := _port(bus, tag, told))]


def _port(bus: dict[str, Any], tag: str, told: Any) -> ThunderboltPort | None:
    if not re.fullmatch(r"receptacle_\w+_tag", tag) or not isinstance(told, dict) or "domain_uuid_key" not in bus:
        return None
    peers = _maps(bus.get("_items"))
    return ThunderboltPort(
        number=str(told.get("receptacle_id_key", "")),
        speed_bps=parse_speed(str(told.get("current_speed_key", ""))),
        connected=str(told.get("receptacle_status_key", "")).endswith("_connected")
        and "no_devices" not in str(told.get("receptacle_status_key", "")),
        host=any("domain_uuid_key" in peer for peer in peers),
    )


def _maps(items: Any) -> list[dict[str, Any]]:
    return [each for each in items if isinstance(each, dict)] if isinstance(items, list) else []


def thunderbolt_generation(ports: Sequence[ThunderboltPort]) -> int:
    """5 from 80 Gbit/s on, 3 for any other port (3 and 4 run at the same 40), 0 for none."""
    if not ports:
        return 0
    return 5 if max(port.speed_bps for port in ports) >= 80 * GIGA else 3


_MAC_VPN = re.compile(r"(utun|ipsec|ppp|gif|stf|tun|wg)\d+")
_MAC_PRIVATE = re.compile(r"(awdl|llw|ap|p2p|anpi|feth|vmenet|vmnet|vnic|tap|pktap|bridge)\d+")
_MAC_THUNDERBOLT = re.compile(r"Thunderbolt (Bridge|\d+)")
"""An adapter is "Thunderbolt Ethernet" or "Thunderbolt Ethernet Slot 1", and wired."""


@dataclass(frozen=True, kw_only=True)
class MacFacts:
    """What macOS says, of all interfaces."""

    ports: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, MacLink] = field(default_factory=dict)
    thunderbolt: Sequence[ThunderboltPort] = ()

    def kind(self, name: str) -> str:
        """By the name of the hardware port; bridges by their members."""
        if re.fullmatch(r"lo\d+", name):
            return LOOPBACK
        port = self.ports.get(name, "")
        if _MAC_THUNDERBOLT.fullmatch(port):
            return THUNDERBOLT
        if port in ("Wi-Fi", "AirPort"):
            return WIFI
        if _MAC_VPN.fullmatch(name):
            return VPN
        members = self.links[name].members if name in self.links else ()
        if members and all(_MAC_THUNDERBOLT.fullmatch(self.ports.get(member, "")) for member in members):
            return THUNDERBOLT
        if _MAC_PRIVATE.fullmatch(name):
            return VIRTUAL
        if "Bluetooth" in port or not port:
            return OTHER
        return WIRED

    def speed(self, name: str) -> int:
        """Bits a second, 0 where nobody says; of a Thunderbolt bridge the fastest port that has a host on it."""
        if self.kind(name) == THUNDERBOLT:
            members = self.links[name].members if name in self.links else ()
            numbers = {self.ports.get(each, "").removeprefix("Thunderbolt ") for each in (name, *members)}
            plugged = [p for p in self.thunderbolt if p.connected or p.host]
            return max((p.speed_bps for p in plugged if p.number in numbers), default=0)
        return media_speed(self.links[name].media) if name in self.links else 0


def parse_rdma(status: str | None) -> str:
    """What `rdma_ctl status` says (Apple's TN3205), as "on" or "off"; "" where there is no such program."""
    return {"enabled": "on", "disabled": "off"}.get((status or "").strip().lower(), "")


def parse_devices(text: str | None) -> tuple[str, ...]:
    """The names in `ibv_devices`: a heading of two lines, then a name and a GUID in each."""
    return tuple(re.findall(r"^\s*(\w+)\s+[0-9a-f]{16}\s*$", text or "", re.MULTILINE))


def parse_release(text: str) -> tuple[int, ...]:
    """A release such as "26.2.1" as (26, 2, 1); () when it is none."""
    return tuple(int(part) for part in text.split(".")) if re.fullmatch(r"\d+(\.\d+)*", text) else ()
