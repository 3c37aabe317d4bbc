"""Names to addresses, off the loop: both families at once, on threads of their own.

`Lookups` belongs to one loop; what it starts are daemon threads inside the system's resolver, which nobody can break
off: one that hangs holds up neither the loop, nor a pool of threads, nor the exit. `addresses_of` waits for all of it
there, and `lookup_all` on a thread that may wait. What a resolver says is believed no further than the handshake with
whoever listens there.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from mlxcel_nb.net.links.addresses import is_numeric

RETRY_S = 0.1
"""A look-up that failed is asked once more after this: resolvers give up too soon."""

HEDGE_S = 0.8
"""One that is not answered is asked again beside the first: a lost datagram costs the C library 5 s otherwise."""

FAMILIES = (socket.AF_INET6, socket.AF_INET)

SockAddr = tuple[Any, ...]
Candidate = tuple[socket.AddressFamily, SockAddr]


def resolve(host: str, port: int, family: socket.AddressFamily) -> list[Candidate]:
    """Addresses of one family behind a name; blocks, so it runs on a thread unless `host` is numeric.

    Raises:
        OSError: there is none, or nobody knows.
    """
    try:
        found = socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
    except UnicodeError:  # a label that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, "not a name that could exist") from None
    return [(socket.AddressFamily(f), sockaddr) for f, _, _, _, sockaddr in found]


def zoned(sockaddr: SockAddr) -> str:
    """The IP address of a socket address; a link-local one with the interface that it means, as in "fe80::1%eth0"."""
    ip, scope = str(sockaddr[0]), sockaddr[3] if len(sockaddr) > 3 else 0
    if not scope or "%" in ip:
        return ip
    try:
        return f"{ip}%{socket.if_indextoname(scope)}"
    except OSError:  # gone meanwhile
        return f"{ip}%{scope}"


class Lookups:
    """The addresses of a host as they become known; numeric hosts are known at once.

    Raises:
        OSError: `host` is an IPv6 address with the zone of no interface.
    """

    def __init__(self, host: str, port: int) -> None:
        self.running: set[asyncio.Future[list[Candidate]]] = set()
        self._found: dict[socket.AddressFamily, list[Candidate]] = {family: [] for family in FAMILIES}
        self._last = socket.AF_INET
        if is_numeric(host):
            version = ipaddress.ip_address(host).version
            self._add(resolve(host, port, socket.AF_INET if version == 4 else socket.AF_INET6))
        else:
            for family in FAMILIES:
                self.running.add(_ask(host, port, family))

    def __bool__(self) -> bool:
        """Whether there is an address to be taken."""
        return any(self._found.values())

    def take(self) -> Candidate:
        """The next address; the families take turns (RFC 8305), so that one that leads nowhere delays by one step."""
        other = socket.AF_INET6 if self._last == socket.AF_INET else socket.AF_INET
        family = other if self._found[other] else self._last
        self._last = family
        return self._found[family].pop(0)

    def collect(self) -> list[BaseException]:
        """Take in finished look-ups; returns why the others failed."""
        failed = []
        for future in [f for f in self.running if f.done()]:
            self.running.discard(future)
            error = future.exception()
            if error is None:
                self._add(future.result())
            else:
                failed.append(error)
        return failed

    def cancel(self) -> None:
        """Nobody wants to know any more."""
        for future in self.running:
            future.cancel()

    def _add(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if candidate not in self._found[candidate[0]]:
                self._found[candidate[0]].append(candidate)


async def addresses_of(name: str, within_s: float) -> tuple[str, ...]:
    """Every IP address behind `name` that is known within so many seconds.

    Raises:
        OSError: as `Lookups`.
    """
    lookups = Lookups(name, 0)
    try:
        async with asyncio.timeout(within_s):
            while lookups.running:
                await asyncio.wait(lookups.running, return_when=asyncio.FIRST_COMPLETED)
                lookups.collect()
    except TimeoutError:
        pass
    finally:
        lookups.cancel()
    found = []
    while lookups:
        found.append(str(lookups.take()[1][0]))
    return tuple(dict.fromkeys(found))


def lookup_all(names: Iterable[str], within_s: float) -> dict[str, tuple[str, ...]]:
    """Every IP address behind each name, IPv4 first, all asked at once, for a thread that may wait that long.

    A name without an address, or without an answer by then, has (). Link-local addresses keep their interface.
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    answers: queue.SimpleQueue[tuple[str, list[Candidate] | None]] = queue.SimpleQueue()

    def ask(name: str, family: socket.AddressFamily) -> None:
        _start(lambda: _resolve_twice(name, 0, family), lambda result, _: answers.put((name, result)))

    for name in found:
        for family in FAMILIES:
            ask(name, family)
    end = time.monotonic() + within_s
    with contextlib.suppress(queue.Empty):
        for _ in range(len(FAMILIES) * len(found)):
            name, candidates = answers.get(timeout=max(0.0, end - time.monotonic()))
            found[name] += [zoned(sockaddr) for _, sockaddr in candidates or ()]
    return {name: tuple(sorted(dict.fromkeys(ips), key=lambda ip: ":" in ip)) for name, ips in found.items()}


# ------------------------------------------------------------------------------------------ threads


def _resolve_twice(host: str, port: int, family: socket.AddressFamily) -> list[Candidate]:
    try:
        return resolve(host, port, family)
    except socket.gaierror as error:
        if error.errno not in {socket.EAI_AGAIN, socket.EAI_FAIL}:
            raise
        threading.Event().wait(RETRY_S)
        return resolve(host, port, family)


def _ask(host: str, port: int, family: socket.AddressFamily) -> asyncio.Future[list[Candidate]]:
    """The answer to one question, from the first of up to two threads that has it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[Candidate]] = loop.create_future()

    def settle(result: list[Candidate] | None, error: OSError | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result or [])

    def answered(result: list[Candidate] | None, error: OSError | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    def ask() -> None:
        if not future.done():
            _start(lambda: _resolve_twice(host, port, family), answered)

    ask()
    again = loop.call_later(HEDGE_S, ask)
    future.add_done_callback(lambda _: again.cancel())
    return future


def _start(
    work: Callable[[], list[Candidate]], answered: Callable[[list[Candidate] | None, OSError | None], None]
) -> None:
    def run() -> None:
        try:
            result = work()
        except OSError as error:
            answered(None, error)
        else:
            answered(result, None)

    threading.Thread(target=run, name="lookup", daemon=True).start()
