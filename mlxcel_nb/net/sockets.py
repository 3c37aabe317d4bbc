"""TCP sockets as every connection of ours wants them: made, tuned, and raced to a name's addresses.

Used from the asyncio loop of a node. Names are looked up on threads, never on the loop, both families at once, so a
slow or broken answer for one family does not hold up the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.errors import ConfigError, PeerLost
from mlxcel_nb.net.addresses import is_numeric
from mlxcel_nb.util import times

USER_TIMEOUT_S = times.STEP_S + 10.0
"""Unacknowledged data, or a window shut this long, ends the connection: above a step's time, so the step's own error
comes first and names the node."""

STAGGER_S = 0.25
"""Head start of one address over the next when a name has several (RFC 8305)."""

LOOKUP_RETRY_S = 0.1
"""A look-up that failed is asked once more after this: resolvers lose datagrams."""

BACKLOG = 256

_KEEPALIVE_IDLE_S = 10
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 6

_OFFLINE = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "no route to the host",
    errno.ENETUNREACH: "network unreachable",
    errno.ETIMEDOUT: "no answer",
}

SockAddr = tuple[Any, ...]
Candidate = tuple[socket.AddressFamily, SockAddr]


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
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
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


def _local(host: str, port: int) -> list[Candidate]:
    """Socket addresses of a local name: numeric ones and `localhost` need no resolver."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host!r}: {error.strerror or error}") from None
    return [(family, sockaddr) for family, _, _, _, sockaddr in found]


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


async def connect(address: Address, *, node: str | None = None) -> socket.socket:
    """A tuned connection to the first address behind `address` that answers. The caller bounds the time.

    Raises:
        PeerLost: nobody there; the message says "offline", as distinct from a failed authentication.
    """
    attempts: set[asyncio.Task[socket.socket]] = set()
    failures: list[str] = []
    lookups = _Lookups(address)
    try:
        while lookups.running or lookups.found or attempts:
            if lookups.found:
                attempts.add(asyncio.ensure_future(_attempt(*lookups.found.pop(0))))
            waiting: set[asyncio.Future[Any]] = {*attempts, *lookups.running}
            pause = STAGGER_S if lookups.found else None
            done, _ = await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            for task in [t for t in attempts if t in done]:
                attempts.discard(task)
                if task.exception() is None:
                    return task.result()
                failures.append(_why(task.exception()))
            failures += lookups.collect()
    finally:
        lookups.cancel()
        await _discard(attempts)
    why = failures[-1] if failures else "the name has no address"
    raise offline(address, why, node=node)


def offline(address: Address, why: str, *, node: str | None = None) -> PeerLost:
    """The error for a host that does not answer at all."""
    return PeerLost(
        f"host {address} is offline: {why}", node=node, advice="Check that the node runs and that the port is right."
    )


class _Lookups:
    """Both families of a name, looked up at once on threads; numeric hosts are found at once."""

    def __init__(self, address: Address) -> None:
        self.found: list[Candidate] = []
        self.running: set[asyncio.Future[list[Candidate]]] = set()
        if is_numeric(address.host):
            version = ipaddress.ip_address(address.host).version
            family = socket.AF_INET if version == 4 else socket.AF_INET6
            self.found = resolve(address.host, address.port, family)
            return
        for family in (socket.AF_INET6, socket.AF_INET):
            self.running.add(_on_thread(functools.partial(_resolve_twice, address.host, address.port, family)))

    def collect(self) -> list[str]:
        """Move finished look-ups into `found`; returns why the others failed."""
        failed = []
        for future in [f for f in self.running if f.done()]:
            self.running.discard(future)
            error = future.exception()
            if error is None:
                self.found += future.result()
            else:
                failed.append(_why(error))
        return failed

    def cancel(self) -> None:
        for future in self.running:
            future.cancel()


def resolve(host: str, port: int, family: socket.AddressFamily) -> list[Candidate]:
    """Addresses of one family behind a name; blocks, so it runs on a thread unless `host` is numeric."""
    found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    return [(socket.AddressFamily(f), sockaddr) for f, _, _, _, sockaddr in found]


def _resolve_twice(host: str, port: int, family: socket.AddressFamily) -> list[Candidate]:
    try:
        return resolve(host, port, family)
    except socket.gaierror as error:
        if error.errno not in {socket.EAI_AGAIN, socket.EAI_FAIL}:
            raise
        threading.Event().wait(LOOKUP_RETRY_S)
        return resolve(host, port, family)


def _on_thread(work: Callable[[], list[Candidate]]) -> asyncio.Future[list[Candidate]]:
    """Run `work` on a daemon thread of its own: a resolver that hangs holds up neither a pool nor the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Candidate]] = loop.create_future()

    def settle(result: list[Candidate] | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result or [])

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except OSError as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="lookup", daemon=True).start()
    return future


async def _attempt(family: socket.AddressFamily, sockaddr: SockAddr) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        tune(sock)
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


def _why(error: BaseException | None) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name is not known ({error.strerror})"
    if isinstance(error, OSError):
        return _OFFLINE.get(error.errno or 0, error.strerror or str(error))
    return str(error)
