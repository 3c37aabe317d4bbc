"""The UDP sockets of discovery: one datagram out of a chosen interface, and where one that came in arrived.

Used from the loop of `net.discovery.beacons`. One socket a family hears all interfaces, because several processes of a
host share the port: every one of them gets a copy of what is broadcast or multicast, while a datagram to a single
address would reach only one. Strangers are trusted with nothing here; bytes are handed on as they came.

What the systems want differs. Linux shares a UDP port between sockets that all set SO_REUSEADDR, of other users too;
BSD's family, macOS with it, wants SO_REUSEPORT. Control messages say by which interface a datagram leaves and came, so
that two interfaces in one subnet are two paths: `IP_PKTINFO` is 8 on Linux and 26 on macOS, and Python names neither.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from mlxcel_nb.errors import ConfigError
from mlxcel_nb.net.discovery.legs import BROADCAST, IPV6, MULTICAST, UNICAST, Leg, Way
from mlxcel_nb.net.discovery.sightings import Heard
from mlxcel_nb.wire.beacon import MAX_BYTES, MULTICAST_V4, MULTICAST_V6

IP_PKTINFO = 26 if sys.platform == "darwin" else 8
_PKTINFO = struct.Struct("@I4s4s")
"""in_pktinfo: interface, our address, the address it was sent to."""
_PKTINFO6 = struct.Struct("@16sI")
"""in6_pktinfo: the address it was sent to, interface."""
_ANCILLARY = 128
"""Room for the control messages of one datagram."""


@dataclass(frozen=True)
class Arrival:
    """A datagram as it came, from the IP address `source`."""

    data: bytes
    source: str
    path: Heard


class Datagrams:
    """The sockets, from `open` to `close`.

    Args:
        port: where beacons are sent and heard.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._v4: socket.socket | None = None
        self._v6: socket.socket | None = None
        self._joined: dict[tuple[str, int], Way] = {}
        self._names: dict[int, str] = {}
        self._own: frozenset[str] = frozenset()

    def open(self) -> list[socket.socket]:
        """The sockets to be read. A host without one of the families has one socket.

        Raises:
            ConfigError: another program holds the port, or the system has neither family.
        """
        missing = OSError("no network")
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                sock = self._bound(family)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    self.close()
                    raise ConfigError(
                        f"discovery needs UDP port {self._port}, which a program holds that does not share it",
                        advice="Stop that program.",
                    ) from None
                missing = error
                continue
            if family == socket.AF_INET:
                self._v4 = sock
            else:
                self._v6 = sock
        found = [sock for sock in (self._v4, self._v6) if sock is not None]
        if not found:
            raise ConfigError(f"discovery cannot open a UDP socket: {reason(missing)}")
        return found

    def _bound(self, family: socket.AddressFamily) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_DGRAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform != "linux":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
                everywhere = "0.0.0.0"  # the reason: what is broadcast reaches no socket that is bound to one address
            else:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 1)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
                everywhere = "::"  # the reason is the same for what is sent to a group
            sock.bind((everywhere, self._port))
        except BaseException:
            sock.close()
            raise
        return sock

    def close(self) -> None:
        """Close both, and forget whatever was joined. Twice is once."""
        for sock in (self._v4, self._v6):
            if sock is not None:
                sock.close()
        self._v4 = self._v6 = None
        self._joined.clear()

    def follow(self, legs: Iterable[Leg]) -> list[tuple[Heard, str]]:
        """Hear the groups on `legs` and nowhere else; returns where that cannot be, and why."""
        self._names, self._own = {}, frozenset()
        wanted: dict[tuple[str, int], Way] = {}
        for leg in legs:
            self._names[leg.index] = leg.name
            self._own = self._own.union(leg.addresses)
            for way in leg.ways():
                if way.name != BROADCAST and self._socket(way) is not None:
                    wanted[way.name, leg.index] = way
        for key in self._joined.keys() - wanted.keys():
            with contextlib.suppress(OSError):  # gone with its interface
                self._membership(self._joined[key], key[1], join=False)
            del self._joined[key]
        failed = []
        for key in sorted(wanted.keys() - self._joined.keys()):
            try:
                self._membership(wanted[key], key[1], join=True)
            except OSError as error:
                failed.append((Heard(self._names[key[1]], key[0]), reason(error)))
            else:
                self._joined[key] = wanted[key]
        return failed

    def _membership(self, way: Way, index: int, *, join: bool) -> None:
        sock = self._socket(way)
        assert sock is not None
        if way.name == IPV6:
            option = socket.IPV6_JOIN_GROUP if join else socket.IPV6_LEAVE_GROUP
            group = socket.inet_pton(socket.AF_INET6, MULTICAST_V6) + struct.pack("@I", index)
            sock.setsockopt(socket.IPPROTO_IPV6, option, group)
        else:
            option = socket.IP_ADD_MEMBERSHIP if join else socket.IP_DROP_MEMBERSHIP
            # An ip_mreqn: Linux goes by the number of the interface, BSD's family by the address.
            group = socket.inet_aton(MULTICAST_V4) + socket.inet_aton(way.source) + struct.pack("@i", index)
            sock.setsockopt(socket.IPPROTO_IP, option, group)

    def _socket(self, way: Way) -> socket.socket | None:
        return self._v6 if way.name == IPV6 else self._v4

    def send(self, leg: Leg, way: Way, data: bytes) -> None:
        """One datagram out of `leg`; none where this host lacks the family.

        Raises:
            OSError: the interface is down, has no route, or may not send.
        """
        sock = self._socket(way)
        if sock is None:
            return
        if way.name == IPV6:
            sock.sendto(data, (way.target, self._port, 0, leg.index))
        else:
            out = _PKTINFO.pack(leg.index, socket.inet_aton(way.source), bytes(4))
            sock.sendmsg([data], [(socket.IPPROTO_IP, IP_PKTINFO, out)], 0, (way.target, self._port))

    def receive(self, sock: socket.socket) -> Arrival | None:
        """The next datagram that waits in `sock`, cut where it is longer than any beacon; None when there is none.

        Raises:
            OSError: what the system says of an interface, or of an earlier datagram.
        """
        try:
            data, ancillary, _, sender = sock.recvmsg(MAX_BYTES + 1, _ANCILLARY)
        except BlockingIOError:
            return None
        path = Heard("?", "?")  # should a system not say
        for level, _, info in ancillary:
            if level == socket.IPPROTO_IP and len(info) >= _PKTINFO.size:
                index, _, to = _PKTINFO.unpack_from(info)
                path = self._path(index, socket.inet_ntoa(to))
            elif level == socket.IPPROTO_IPV6 and len(info) >= _PKTINFO6.size:
                to, index = _PKTINFO6.unpack_from(info)
                path = self._path(index, socket.inet_ntop(socket.AF_INET6, to))
        return Arrival(data, str(sender[0]), path)

    def _path(self, index: int, target: str) -> Heard:
        name = self._names.get(index) or _name(index)
        if target in self._own:
            return Heard(name, UNICAST)
        if ":" in target:
            return Heard(name, IPV6)
        return Heard(name, MULTICAST if ipaddress.ip_address(target).is_multicast else BROADCAST)


def _name(index: int) -> str:
    """Of an interface that has come since the last look."""
    try:
        return socket.if_indextoname(index)
    except OSError:
        return "?"


def reason(error: OSError) -> str:
    """Why the system refused, in its words."""
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))
