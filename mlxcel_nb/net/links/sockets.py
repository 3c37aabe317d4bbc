"""TCP sockets as every connection of ours wants them: made, tuned, and raced to a name's addresses.

Used from the asyncio loop of a node. Names are looked up off the loop (`resolver`), both families at once, so a slow
or broken answer for one family does not hold up the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.errors import ConfigError, PeerLost
from mlxcel_nb.net.links.addresses import fits, is_link_local
from mlxcel_nb.net.links.resolver import Candidate, Lookups, SockAddr
from mlxcel_nb.util import times

USER_TIMEOUT_S = times.STEP_S + 10.0
"""Unacknowledged data, or a window shut this long, ends the connection: above a step's time, so the step's own error
comes first and names the node."""

STAGGER_S = 0.25
"""Head start of one address over the next when a name has several (RFC 8305)."""

BACKLOG = 4096
"""Connections that wait to be accepted; the system may grant less. When the queue is full a newcomer is dropped, and
tries again only after a second, so it holds a flood that comes all at once."""

SOURCE_S = 1.0
"""For a connection from the address that was asked for; after that it comes from wherever the system has it come."""

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 6
_IP_BIND_ADDRESS_NO_PORT = 24
"""Linux's number of an option that Python does not name."""

_OFFLINE = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "network unreachable",
    errno.ETIMEDOUT: "no answer",
}

_OTHER_WAY = "Look at this host's interfaces, cables and Wi-Fi: is one of them in the other's network?"

SILENCE = "The host may be off, or a firewall may drop what is sent to that port."
"""What to look at where not even a refusal comes back."""

_MEND = {errno.EHOSTUNREACH: _OTHER_WAY, errno.ENETUNREACH: _OTHER_WAY, errno.ETIMEDOUT: SILENCE}

_OTHER_BIND = "Choose another address of this host, or another port."

_OTHER_NAME = "Check the spelling, or write its IP address."


def tune(sock: socket.socket) -> None:
    """Set what every data-plane connection has: no delay, non-blocking, dead peers noticed by the kernel as well."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _KEEPALIVE_IDLE_S,
        "TCP_KEEPALIVE": _KEEPALIVE_IDLE_S,  # macOS's name for the same
        "TCP_KEEPINTVL": _KEEPALIVE_INTERVAL_S,
        "TCP_KEEPCNT": _KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": int(USER_TIMEOUT_S * 1000),
    }
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if sys.platform == "darwin":
        with contextlib.suppress(OSError):  # TCP_RXT_CONNDROPTIME, in seconds; Python has no name for it
            sock.setsockopt(socket.IPPROTO_TCP, 0x80, int(USER_TIMEOUT_S))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket at an address of this host. Port 0 lets the system choose.

    Raises:
        ConfigError: the port is taken (the holder is named when it may be seen), or the address is not this host's.
    """
    for family, sockaddr in _local(host, port):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(sockaddr)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"port {port} in use{_holder_of(port)}", advice="Choose another, or 0.") from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"{host} is not an address of this host", advice=_ours()) from None
            cause, mend = _zone_problem(host) or (error.strerror or str(error), _OTHER_BIND)
            raise ConfigError(f"cannot listen on {Address(host, port)}: {cause}", advice=mend) from None
        sock.setblocking(False)
        return sock
    raise ConfigError(f"{host} is not an address of this host")


def bind_range(host: str, ports: range) -> socket.socket:
    """A listening socket at the first free port of `ports`.

    Raises:
        ConfigError: as `bind`; when there are several ports, for all of them.
    """
    if len(ports) == 1:
        return bind(host, ports[0])
    last: ConfigError | None = None
    for port in ports:
        try:
            return bind(host, port)
        except ConfigError as error:
            if " in use" not in error.cause:
                raise
            last = error
    if last is None:
        raise ConfigError("the port range is empty")
    raise ConfigError(f"no free port in {ports.start}-{ports.stop - 1}: {last.cause}", advice="Widen --port-range.")


def unaccepting(error: OSError) -> str:
    """What to tell of a listener that cannot accept, and the mend where the limit is this process's own."""
    mend = ". Start it with a larger limit, as after: ulimit -n 4096" if error.errno == errno.EMFILE else ""
    return f"cannot accept connections for a moment: {error.strerror or error}{mend}"


def _local(host: str, port: int) -> list[Candidate]:
    """Socket addresses of a local name: numeric ones and `localhost` need no resolver."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        cause, mend = _zone_problem(host) or (error.strerror or str(error), _OTHER_NAME)
        raise ConfigError(f"cannot listen on {host!r}: {cause}", advice=mend) from None
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


def _ours() -> str:
    from mlxcel_nb.net.interfaces.probe import own_addresses

    return f"It has {', '.join(sorted(own_addresses()))}."


def _holder_of(port: int) -> str:
    """` by pid N` when the listener on `port` may be seen, else nothing."""
    import psutil

    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return ""
    for connection in connections:
        local = connection.laddr
        if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
            return f" by pid {connection.pid}"
    return ""


async def connect(address: Address, *, node: str | None = None, source: str = "") -> socket.socket:
    """A tuned connection to the first address behind `address` that answers. The caller bounds the time.

    Args:
        source: this host's IP address that it shall come from: the one that the peer has for this node. What is no
            use for a target, or leads nowhere from there, comes from where the system has it come.

    Raises:
        PeerLost: nobody there; the message says "offline", as distinct from a failed authentication.
    """
    attempts: set[asyncio.Task[socket.socket]] = set()
    failures: list[BaseException | None] = []
    try:
        lookups = Lookups(address.host, address.port)
    except OSError as error:
        raise offline(address, *_why(error, address), node=node) from None
    try:
        while lookups.running or lookups or attempts:
            if lookups:
                attempts.add(asyncio.ensure_future(_attempt(*lookups.take(), source)))
            waiting: set[asyncio.Future[Any]] = {*attempts, *lookups.running}
            pause = STAGGER_S if lookups else None
            done, _ = await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            for task in [t for t in attempts if t in done]:
                attempts.discard(task)
                if task.exception() is None:
                    return task.result()
                failures.append(task.exception())
            failures += lookups.collect()
    finally:
        lookups.cancel()
        await _discard(attempts)
    tried = [error for error in failures if not isinstance(error, socket.gaierror)] or failures
    why = _why(tried[-1], address) if tried else ("the name has no address", _OTHER_NAME)
    raise offline(address, *why, node=node)


def offline(address: Address, why: str, mend: str = "", *, node: str | None = None) -> PeerLost:
    """The error for a host that does not answer at all."""
    mend = mend or "Check that the node runs and that the port is right."
    return PeerLost(f"host {address} is offline: {why}", node=node, advice=mend)


async def _attempt(family: socket.AddressFamily, sockaddr: SockAddr, source: str) -> socket.socket:
    if fits(source, str(sockaddr[0])):
        try:
            async with asyncio.timeout(SOURCE_S):
                return await _attempt_from(family, sockaddr, source)
        except ConnectionRefusedError:  # an answer: it would be the same from anywhere
            raise
        except OSError:  # or the time is up
            pass
    return await _attempt_from(family, sockaddr, "")


async def _attempt_from(family: socket.AddressFamily, sockaddr: SockAddr, source: str) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
        if source:
            if sys.platform == "linux":  # the port is chosen when the target is known, so many fit
                sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(sock, sockaddr)
        if sock.getsockname() == sock.getpeername():
            # A dead port among the ephemeral ones can be connected to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    except BaseException:
        sock.close()
        raise
    return sock


async def _discard(attempts: set[asyncio.Task[socket.socket]]) -> None:
    """End what lost the race, sockets that had connected meanwhile included."""
    for task in attempts:
        task.cancel()
    for result in await asyncio.gather(*attempts, return_exceptions=True):
        if isinstance(result, socket.socket):
            result.close()


def _zone_problem(host: str) -> tuple[str, str] | None:
    """What is wrong with the interface of a link-local address, and the mend; None where it is not that."""
    _, percent, zone = host.partition("%")
    if percent and not zone.isdigit() and zone not in {name for _, name in socket.if_nameindex()}:
        return f"this host has no interface {zone}", "Behind % stands an interface of this very host."
    if is_link_local(host) and not percent:
        return "a link-local address needs the interface", "Write it as in [fe80::1%eth0]:9000."
    return None


def _why(error: BaseException | None, address: Address) -> tuple[str, str]:
    """The cause, and the mend where it is not the usual one."""
    refused = isinstance(error, ConnectionRefusedError)
    if not refused and (problem := _zone_problem(address.host)):
        return problem
    if isinstance(error, socket.gaierror):
        asked = error.errno in {socket.EAI_AGAIN, socket.EAI_FAIL}
        return f"the name {'cannot be looked up' if asked else 'is not known'} ({error.strerror})", _OTHER_NAME
    if isinstance(error, OSError):
        number = error.errno or 0
        return _OFFLINE.get(number, error.strerror or str(error)), _MEND.get(number, "")
    return str(error), ""
