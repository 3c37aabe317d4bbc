"""The one probe: what this host's network interfaces are, asked of the system.

Only questions are here; `facts` understands the answers and `cluster/` judges them. `probe` blocks, for
`WAIT_S` at most, so it runs on a thread, never on a loop. It needs no privilege, changes nothing, and what cannot be
asked is left out and named in `HostFacts.missing`. On macOS it starts system programs; on Linux it reads /sys.
Not run on Thunderbolt hardware yet, on either system.
"""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import ipaddress
import os
import platform
import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlxcel_nb.cluster.places import OTHER, Interface
from mlxcel_nb.cluster.transports import HostFacts
from mlxcel_nb.net.interfaces import facts

WAIT_S = 6.0
"""For the slowest question: system_profiler takes a second or two."""

_SYS_NET = Path("/sys/class/net")
_SYS_THUNDERBOLT = Path("/sys/bus/thunderbolt/devices")
_SYS_INFINIBAND = Path("/sys/class/infiniband")

_QUESTIONS: Mapping[str, Sequence[str]] = {
    "networksetup": ("/usr/sbin/networksetup", "-listallhardwareports"),
    "ifconfig": ("/sbin/ifconfig",),
    "system_profiler": ("/usr/sbin/system_profiler", "SPThunderboltDataType", "-json"),
    "rdma_ctl": ("/usr/bin/rdma_ctl", "status"),
    "ibv_devices": ("/usr/bin/ibv_devices",),
}
_MAY_BE_ABSENT = frozenset({"rdma_ctl", "ibv_devices"})  # before macOS 26.2

_SIOCETHTOOL, _ETHTOOL_GDRVINFO, _DRVINFO_BYTES = 0x8946, 0x3, 196  # linux/ethtool.h


def probe() -> HostFacts:
    """Everything there is to know of this host's ways out. Blocks, see above; raises nothing of the system's."""
    return _probe_mac() if sys.platform == "darwin" else _probe_linux()


@functools.cache
def host_id() -> str:
    """The same in every process of this network stack and in no other, for as long as the machine runs.

    A container with a network of its own is another host: its loopback is not ours.
    """
    parts = [socket.gethostname()]
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        with contextlib.suppress(OSError):
            parts.append(str(Path("/proc/self/ns/net").stat().st_ino))
    else:
        parts.append(str(uuid.getnode()))
    return hashlib.sha256("\n".join(["mlxcel-nb host", *parts]).encode()).hexdigest()[:16]


def own_addresses() -> frozenset[str]:
    """This host's IP addresses in the spelling they are compared in, loopback among them, zones left off."""
    return frozenset(str(ipaddress.ip_interface(text).ip) for texts in _addresses().values() for text in texts)


# ------------------------------------------------------------------------------------------ both systems


def _addresses() -> dict[str, tuple[str, ...]]:
    """Addresses of each interface with their networks' lengths, as "10.0.0.1/24"."""
    import psutil

    found: dict[str, tuple[str, ...]] = {}
    for name, entries in psutil.net_if_addrs().items():
        texts = []
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(ValueError):
                    texts.append(_with_length(entry.address, entry.netmask))
        found[name] = tuple(dict.fromkeys(texts))
    return found


def _with_length(address: str, mask: str | None) -> str:
    ip = ipaddress.ip_address(address.partition("%")[0])
    length = int(ipaddress.ip_address(mask)).bit_count() if mask else ip.max_prefixlen
    return str(ipaddress.ip_interface(f"{ip}/{length}"))


def _interfaces(kinds: Mapping[str, str], speeds: Mapping[str, int]) -> tuple[Interface, ...]:
    import psutil

    addresses, stats = _addresses(), psutil.net_if_stats()
    found = []
    for name in sorted(stats):
        running = "running" in stats[name].flags.split(",") or sys.platform != "linux"
        found.append(
            Interface(
                name=name,
                kind=kinds.get(name, OTHER),
                addresses=addresses.get(name, ()),
                speed_bps=speeds.get(name, 0) or stats[name].speed * facts.MEGA,
                mtu=stats[name].mtu,
                up=stats[name].isup and running,
            )
        )
    return tuple(found)


def _text(path: Path) -> str:
    """A small file of /sys; "" when it is not there or its driver does not answer."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


# ------------------------------------------------------------------------------------------ Linux


def _probe_linux() -> HostFacts:
    names = sorted(path.name for path in _listed(_SYS_NET))
    links = {name: _linux_link(name) for name in names}
    peers = [path for path in _listed(_SYS_THUNDERBOLT) if "thunderbolt_xdomain" in _text(path / "uevent")]
    return HostFacts(
        system=platform.system(),
        interfaces=_interfaces(
            {name: facts.linux_kind(link, links) for name, link in links.items()},
            {name: facts.linux_speed(link, links) for name, link in links.items()},
        ),
        thunderbolt=3 if _listed(_SYS_THUNDERBOLT) else 0,
        cable=bool(peers),
        driver=Path("/sys/bus/thunderbolt/drivers/thunderbolt-net").exists(),
        rdma="on" if _listed(_SYS_INFINIBAND) else "",
        rdma_devices=tuple(sorted(path.name for path in _listed(_SYS_INFINIBAND))),
        missing=() if names else ("/sys/class/net: nothing there",),
    )


def _linux_link(name: str) -> facts.LinuxLink:
    folder = _SYS_NET / name
    events = dict(line.split("=", 1) for line in _text(folder / "uevent").splitlines() if "=" in line)
    flags = _text(folder / "tun_flags")
    below = [path.name for path in _listed(folder / "brif")]
    below += [path.name.removeprefix("lower_") for path in _listed(folder) if path.name.startswith("lower_")]
    driver = ""
    with contextlib.suppress(OSError):
        driver = (folder / "device" / "driver").readlink().name
    peer = folder / "device" / ".."  # the service's parent in /sys is the host at the other end of the cable
    return facts.LinuxLink(
        name=name,
        type=_number(_text(folder / "type"), 1),
        driver=driver or _driver(name),
        devtype=events.get("DEVTYPE", ""),
        wireless=(folder / "wireless").exists() or (folder / "phy80211").exists(),
        tun_flags=int(flags, 16) if flags.startswith("0x") else None,
        below=tuple(sorted(set(below))),
        speed_mbit=_number(_text(folder / "speed"), 0),
        lane_speed=_text(peer / "rx_speed") if driver == "thunderbolt-net" else "",
        lanes=_number(_text(peer / "rx_lanes"), 0) if driver == "thunderbolt-net" else 0,
    )


def _driver(name: str) -> str:
    """The driver of a device that only exists in the kernel, such as a veth, by ethtool's oldest question."""
    import fcntl

    buffer = array.array("B", struct.pack("I", _ETHTOOL_GDRVINFO) + bytes(_DRVINFO_BYTES - 4))
    request = struct.pack("16sP", name.encode()[:15], buffer.buffer_info()[0]) + bytes(16)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            fcntl.ioctl(sock.fileno(), _SIOCETHTOOL, request)
    except OSError:
        return ""
    return buffer.tobytes()[4:36].partition(b"\0")[0].decode("ascii", "replace")


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _number(text: str, default: int) -> int:
    try:
        return int(text)
    except ValueError:
        return default


# ------------------------------------------------------------------------------------------ macOS


def _probe_mac() -> HostFacts:
    with ThreadPoolExecutor(len(_QUESTIONS), thread_name_prefix="mlxcel-probe") as pool:
        answers = dict(zip(_QUESTIONS, pool.map(_ask, _QUESTIONS.values()), strict=True))
    return mac_facts(answers, facts.parse_release(platform.mac_ver()[0]), _interfaces)


def mac_facts(
    answers: Mapping[str, str | None],
    release: tuple[int, ...],
    interfaces: Callable[[Mapping[str, str], Mapping[str, int]], tuple[Interface, ...]],
) -> HostFacts:
    """The facts in the answers to `_QUESTIONS`, None for one that was not answered."""
    ports = facts.parse_thunderbolt(answers["system_profiler"] or "")
    mac = facts.MacFacts(
        ports=facts.parse_hardware_ports(answers["networksetup"] or ""),
        links=facts.parse_ifconfig(answers["ifconfig"] or ""),
        thunderbolt=ports,
    )
    names = {*mac.links, *mac.ports}
    devices = facts.parse_devices(answers["ibv_devices"])
    return HostFacts(
        system="Darwin",
        release=release,
        interfaces=interfaces({n: mac.kind(n) for n in names}, {n: mac.speed(n) for n in names}),
        thunderbolt=5 if devices else facts.thunderbolt_generation(ports),
        cable=any(port.host for port in ports),
        rdma=facts.parse_rdma(answers["rdma_ctl"]),
        rdma_devices=devices,
        missing=tuple(
            f"{name}: no answer" for name, said in answers.items() if said is None and name not in _MAY_BE_ABSENT
        ),
    )


def _ask(argv: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=WAIT_S, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
