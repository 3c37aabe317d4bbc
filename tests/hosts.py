"""Several hosts on one machine: network namespaces joined by bridges, for tests where more than one host is meant.

    with hosts(2) as (a, b):                              # one link, eth0, between them
    with hosts(2, links=("eth0", "tb0")) as (a, b):       # two links, a subnet each

A set has a hub namespace with one bridge a link; every host has a veth into each bridge. Nothing leads out of a set, so
sets run side by side (`pytest -n 2`) with the same addresses. Each link has an IPv4 /24, an IPv6 /64 of unique local
addresses, and link-local IPv6. Packets are dropped and slowed in the hub, where the hosts cannot tell: no reset, no
error, silence. (After some seconds of it a host's own neighbour look-up fails, as it does on a real LAN.)

Needs root, iproute2 and nftables on Linux. Without them a test is left out and says why; CI demands them. Everything is
removed at the end; what a killed run left is removed by the next run on the machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PREFIX = "mxhosts"
"""Every namespace of ours is PREFIX-PID-START-SERIAL-NAME: whose it is, and whether that process still lives."""

REPO = Path(__file__).parents[1]
ETC_NETNS = Path("/etc/netns")
_CLONE_NEWNET = 0x40000000

_serial = itertools.count()
_sweep_once = threading.Lock()
_swept = False


class Host:
    """One host of a set. The address properties are those of its first link."""

    def __init__(self, parts: _Set, index: int, name: str) -> None:
        self._parts = parts
        self.index = index
        self.name = name
        self.namespace = f"{parts.stem}-{name}"
        self.links = parts.links
        self.addresses = {link: f"10.77.{k}.{index + 1}" for k, link in enumerate(parts.links)}
        self.addresses6 = {link: f"fd77:0:0:{k + 1}::{index + 1}" for k, link in enumerate(parts.links)}
        self.link_locals = {link: f"fe80::{k + 1}:{index + 1}" for k, link in enumerate(parts.links)}

    def __repr__(self) -> str:
        return f"<host {self.name} {self.address}>"

    @property
    def address(self) -> str:
        return self.addresses[self.links[0]]

    @property
    def address6(self) -> str:
        return self.addresses6[self.links[0]]

    @property
    def link_local(self) -> str:
        """Without a zone: the zone is the interface of whoever connects to it, `eth0` on every host of a set."""
        return self.link_locals[self.links[0]]

    # ------------------------------------------------------------------------------------------ processes

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on this host; its pid is the program's own. Killed at the end if it still runs."""
        options.setdefault("cwd", REPO)
        process = subprocess.Popen(["ip", "netns", "exec", self.namespace, *argv], **options)
        self._parts.processes.append(process)
        return process

    def run(self, argv: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """A program on this host, to its end: text is captured, 30 s at most."""
        options = {"cwd": REPO, "capture_output": True, "text": True, "timeout": 30, **options}
        return subprocess.run(["ip", "netns", "exec", self.namespace, *argv], check=False, **options)

    def python(self, code: str, *args: str, **options: Any) -> subprocess.CompletedProcess[Any]:
        """Python code on this host, to its end."""
        return self.run([sys.executable, "-c", code, *args], **options)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread stands on this host, as do threads it starts meanwhile: sockets made there are the host's.

        Only the network moves: /sys still shows the machine's own interfaces.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            Path(f"/proc/self/task/{threading.get_native_id()}/ns/net").open("rb") as home,
            Path(f"/run/netns/{self.namespace}").open("rb") as there,
        ):
            if libc.setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
            try:
                yield
            finally:
                if libc.setns(home.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "cannot come back")

    # ------------------------------------------------------------------------------------------ the network

    def cut(self, link: str | None = None) -> None:
        """From now on every packet to and from this host is lost, on one link or on all."""
        for name in self._chosen(link):
            self._parts.cuts.add((name, self.index, None))
        self._parts.apply_cuts()

    def mend(self, link: str | None = None) -> None:
        """Take back every cut of this host, on one link or on all."""
        names = self._chosen(link)
        self._parts.cuts = {c for c in self._parts.cuts if not (c[0] in names and self.index in c[1:])}
        self._parts.apply_cuts()

    def cut_from(self, other: Host, link: str | None = None) -> None:
        """Every packet between these two is lost; each still reaches the others. `mend` of either takes it back."""
        for name in self._chosen(link):
            self._parts.cuts.add((name, self.index, other.index))
        self._parts.apply_cuts()

    def limit(self, rate: str | None, link: str | None = None) -> None:
        """At most `rate` ("10mbit", as tc writes it) each way on one link or on all; None lifts it."""
        for name in self._chosen(link):
            for namespace, device in ((self.namespace, name), (self._parts.hub, _port(name, self.index))):
                if rate is None:
                    _ip_tool(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"], check=False)
                else:
                    shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
                    _ip_tool(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape])

    def down(self, link: str) -> None:
        """Pull the cable: the interface loses its carrier, which the host does notice."""
        _ip_tool(["ip", "-n", self._parts.hub, "link", "set", _port(link, self.index), "down"])

    def up(self, link: str) -> None:
        _ip_tool(["ip", "-n", self._parts.hub, "link", "set", _port(link, self.index), "up"])

    def _chosen(self, link: str | None) -> tuple[str, ...]:
        if link is not None and link not in self.links:
            raise ValueError(f"{link} is not one of {self.links}")
        return self.links if link is None else (link,)

    # ------------------------------------------------------------------------------------------ names

    def resolver(self, nameserver: str | None, known: dict[str, str] | None = None) -> None:
        """What programs started on this host from now on find in resolv.conf and hosts: one name server (short
        time-outs), and names with their addresses. The C library's order "files, dns" is set too."""
        folder = ETC_NETNS / self.namespace
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"{address} {name}\n" for name, address in (known or {}).items())
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + lines)
        server = f"nameserver {nameserver}\n" if nameserver else ""
        (folder / "resolv.conf").write_text(server + "options timeout:5 attempts:2\n")
        (folder / "nsswitch.conf").write_text("hosts: files dns\n")


class _Set:
    """The namespaces of one `hosts()`: made, cut, and removed together."""

    def __init__(self, count: int, links: tuple[str, ...]) -> None:
        self.stem = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self.hub = f"{self.stem}-hub"
        self.links = links
        self.hosts = [Host(self, k, chr(ord("a") + k)) for k in range(count)]
        self.processes: list[subprocess.Popen[Any]] = []
        self.cuts: set[tuple[str, int, int | None]] = set()
        """(link, host, the other host or None for everyone)."""

    @property
    def namespaces(self) -> list[str]:
        return [self.hub, *(host.namespace for host in self.hosts)]

    def make(self) -> None:
        _batch([f"netns add {name}" for name in self.namespaces])
        for name in self.namespaces:  # no duplicate address detection: addresses are usable at once
            quiet = "for w in all default; do echo 0 > /proc/sys/net/ipv6/conf/$w/accept_dad; done"
            generated = "echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode"
            _ip_tool(["ip", "netns", "exec", name, "sh", "-c", f"{quiet}; {generated}"])
        bridges = [
            line
            for link in self.links
            # Without multicast snooping a bridge passes multicast on at once, as a small switch does.
            for line in (f"link add br-{link} type bridge mcast_snooping 0", f"link set br-{link} up")
        ]
        for host in self.hosts:
            for link in self.links:
                port = _port(link, host.index)
                bridges.append(f"link add {port} type veth peer name {link} netns {host.namespace}")
                bridges += [f"link set {port} master br-{link}", f"link set {port} up"]
        _batch(bridges, self.hub)
        for host in self.hosts:
            lines = ["link set lo up"]
            for link in self.links:
                lines += [
                    f"addr add {host.addresses[link]}/24 brd + dev {link}",
                    f"addr add {host.addresses6[link]}/64 dev {link} nodad",
                    f"addr add {host.link_locals[link]}/64 dev {link} scope link nodad",
                    f"link set {link} up",
                ]
            _batch(lines, host.namespace)
        self.apply_cuts()

    def apply_cuts(self) -> None:
        rules = []
        for link, one, other in sorted(self.cuts, key=str):
            here = f'"{_port(link, one)}"'
            there = "" if other is None else f'"{_port(link, other)}"'
            for source, target in ((here, there), (there, here)):
                matches = (f"iifname {source} " if source else "") + (f"oifname {target} " if target else "")
                rules.append(f"add rule bridge cuts forward {matches}drop")
        text = "\n".join(
            [
                "add table bridge cuts",
                "add chain bridge cuts forward { type filter hook forward priority 0; policy accept; }",
                "flush chain bridge cuts forward",
                *rules,
                "",
            ]
        )
        _ip_tool(["ip", "netns", "exec", self.hub, "nft", "-f", "-"], text)

    def remove(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        for name in self.namespaces:
            _remove(name)


@contextlib.contextmanager
def hosts(count: int = 2, *, links: tuple[str, ...] = ("eth0",)) -> Iterator[list[Host]]:
    """`count` hosts (a, b, c, ...) that reach each other over every link of `links`."""
    if reason := missing():
        if os.environ.get("CI") or os.environ.get("MLXCEL_NB_REQUIRE_ALL"):
            pytest.fail(f"hosts in network namespaces: {reason}")
        pytest.skip(f"hosts in network namespaces: {reason}")  # a user's machine need not be Linux, nor the user root
    _sweep()
    parts = _Set(count, links)
    try:
        parts.make()
        yield parts.hosts
    finally:
        parts.remove()


def missing() -> str:
    """Why this machine cannot play several hosts, or nothing."""
    if sys.platform != "linux":
        return "only Linux has them"
    if os.geteuid() != 0:
        return "they need root"
    lacking = [package for tool, package in (("ip", "iproute2"), ("nft", "nftables")) if not shutil.which(tool)]
    if lacking:
        return f"{' and '.join(lacking)} not installed"
    return "" if _allowed() else "this machine does not allow them (a container without the right to make namespaces?)"


_allowed_answer: bool | None = None


def _allowed() -> bool:
    global _allowed_answer
    if _allowed_answer is None:
        name = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}-probe"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
        nft = ["ip", "netns", "exec", name, "nft", "add", "table", "bridge", "probe"]
        _allowed_answer = made and subprocess.run(nft, capture_output=True, check=False).returncode == 0
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return _allowed_answer


def _port(link: str, index: int) -> str:
    """The hub's end of a host's veth; interface names hold 15 characters."""
    return f"{link[:10]}.{index}"


def _batch(lines: list[str], namespace: str | None = None) -> None:
    _ip_tool(["ip", *(["-n", namespace] if namespace else []), "-batch", "-"], "\n".join(lines) + "\n")


def _ip_tool(argv: list[str], text: str | None = None, *, check: bool = True) -> None:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False, timeout=30)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}\n{text or ''}")


def _started(pid: int) -> int | None:
    """When a process started, in whole seconds; None when there is none."""
    try:
        return int(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def _sweep() -> None:
    """Remove, once a run, the sets of runs that no longer live."""
    global _swept
    with _sweep_once:
        if _swept:
            return
        _swept = True
        for name in existing():
            _, pid, started, *_ = name.split("-")
            now = _started(int(pid))
            if now is None or abs(now - int(started)) > 2:
                _remove(name)


def existing() -> list[str]:
    """The namespaces on this machine that a run of these tests made, ours and others'."""
    listed = subprocess.run(["ip", "-j", "netns", "list"], capture_output=True, text=True, check=False)
    names = [entry["name"] for entry in json.loads(listed.stdout or "[]")]
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def _remove(name: str) -> None:
    """Remove a namespace with all that runs in it."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        if int(pid) != os.getpid():  # a thread of ours may stand inside
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    shutil.rmtree(ETC_NETNS / name, ignore_errors=True)
