"""The one listening socket of a node: from accept to a `Link`, or to a closed socket.

Runs on the loop that calls `start`. Whoever connects is trusted with nothing until its proof holds, and then only to
be a member: `PendingPool` bounds what strangers cost, `Admission` ties members to their ids. Both are pure; this
module does what they say.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import inspect
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.cluster.shape import Shapes
from mlxcel_nb.errors import (
    AuthenticationFailed,
    ClusterMismatch,
    ConfigError,
    HandshakeError,
    MlxcelError,
    Refused,
    SuiteMismatch,
    VersionMismatch,
)
from mlxcel_nb.net.links.addresses import is_numeric, normal_ip
from mlxcel_nb.net.links.admission import Admission, Decision
from mlxcel_nb.net.links.complaints import Complaints, Seldom
from mlxcel_nb.net.links.guest import Guest, any_alive
from mlxcel_nb.net.links.known_names import KnownNames
from mlxcel_nb.net.links.link import Link, peer_address
from mlxcel_nb.net.links.opening import open_link
from mlxcel_nb.net.links.pending import PendingPool
from mlxcel_nb.net.links.sockets import bind_range, tune, unaccepting
from mlxcel_nb.util import times
from mlxcel_nb.util.log import get_logger, trail
from mlxcel_nb.wire.handshake import Identity, RejectCode, ServerHandshake, State, VerdictCode, encode_reject
from mlxcel_nb.wire.hello import MAX_MESSAGE

log = get_logger("net.listener")

ACCEPTS_PER_TURN = 16
"""Connections taken before the loop's other work gets its turn."""

ACCEPT_PAUSE_S = 0.2
"""Before trying again when the process has no file descriptor left."""

FULL_S = 60.0
"""Between two lines about that."""

MISMATCHES = frozenset(error.code for error in (AuthenticationFailed, VersionMismatch, SuiteMismatch, ClusterMismatch))
"""What `counts` calls peers that cannot be let in because the two sides were set up differently."""


class Listener:
    """Accepts, proves and admits; each good connection becomes a `Link` for `on_link`.

    Args:
        identity: what this node says of itself, or a callable that says it afresh for every connection. An empty
            `data_addr` is filled in with the address that was bound.
        secrets: the current cluster secret, then older ones that are still let in.
        on_link: takes over each link, on the loop; may be a coroutine function.
        configured: addresses and host names that the configuration has per node id: it may come from no others.
        hello: merged into our first control frame.
        rekey_every: frames after which this side takes its next key.
        shapes: how what is sent to a node is shaped.
        on_mismatch: told of each peer whose secret, version, suite or cluster is another, in place of the log.
    """

    def __init__(
        self,
        identity: Identity | Callable[[], Identity],
        secrets: Iterable[Secret],
        *,
        on_link: Callable[[Link], Awaitable[None] | None],
        configured: Mapping[str, Collection[str]] | None = None,
        hello: Mapping[str, Any] | None = None,
        rekey_every: int | None = None,
        shapes: Shapes | None = None,
        on_mismatch: Callable[[str], object] | None = None,
    ) -> None:
        self._identity = identity
        self._on_mismatch = on_mismatch
        self.use(secrets)
        self._on_link = on_link
        self._hello = hello
        self._rekey_every = rekey_every
        self._shapes = shapes
        named = configured or {}
        self._pool = PendingPool(trusted=frozenset(normal_ip(ip) for ips in named.values() for ip in ips))
        self._names = KnownNames(named)
        self._learning: asyncio.Task[None] | None = None
        self.admission: Admission[Guest] = Admission(named)
        self._visits: dict[socket.socket, asyncio.Task[None]] = {}
        self._sock: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._complaints = Complaints()
        self._full = Seldom(FULL_S)
        self.address: Address | None = None
        self.bound = ""
        """The IP address the socket is bound to, whatever name led there."""
        self.counts: collections.Counter[str] = collections.Counter()

    async def start(self, host: str = "127.0.0.1", port: int = 0, port_range: tuple[int, int] | None = None) -> Address:
        """Bind and listen; the address the system gave is returned, to be published.

        Args:
            port_range: first and last port, of which the first free one is taken; `port` is then ignored.

        Raises:
            ConfigError: the port is in use, or the address is not this host's. Nothing is left open.
        """
        if self._sock is not None:
            raise ConfigError(f"already listening on {self.address}")
        ports = range(port_range[0], port_range[1] + 1) if port_range else range(port, port + 1)
        # A name is looked up off the loop; an address needs no thread.
        sock = bind_range(host, ports) if is_numeric(host) else await asyncio.to_thread(bind_range, host, ports)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self.address = Address(host, sock.getsockname()[1])
        self.bound = sock.getsockname()[0]
        self._loop.add_reader(sock.fileno(), self._accept)
        if self._names.nodes:
            self._learning = self._loop.create_task(self._learn_names())
        return self.address

    async def close(self) -> None:
        """Stop accepting and drop what is half-open. Established links belong to those who took them."""
        if self._sock is None or self._loop is None:
            return
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        self._sock = None
        self._names.close()
        if self._learning is not None:
            self._learning.cancel()
        visits = list(self._visits.values())
        for task in visits:
            task.cancel()
        await asyncio.gather(*visits, return_exceptions=True)

    def use(self, secrets: Iterable[Secret]) -> None:
        """Let in whoever knows one of these from now on; links that stand are not touched."""
        self._secrets = tuple(secrets)

    @property
    def pending(self) -> int:
        """Connections whose handshake is not done."""
        return len(self._pool)

    # -- accept -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._loop is not None
        for _ in range(ACCEPTS_PER_TURN):
            if self._sock is None:
                return
            try:
                sock, _ = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # gone before it was taken
            except OSError as error:
                if self._full.due(time.monotonic()):
                    log.warning("%s", unaccepting(error))
                self._loop.remove_reader(self._sock.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            self._receive(sock)

    def _resume(self) -> None:
        if self._sock is not None and self._loop is not None:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _receive(self, sock: socket.socket) -> None:
        """Give a newcomer its place in the pool and a task, or turn it away."""
        assert self._loop is not None
        try:
            tune(sock)
        except OSError:
            sock.close()
            return
        ip, _ = peer_address(sock)
        if not ip:  # gone already
            sock.close()
            return
        arrival = self._pool.arrive(sock, ip)
        if arrival.evicted is not None and isinstance(arrival.evicted.key, socket.socket):
            self.counts["evicted"] += 1
            self._visits[arrival.evicted.key].cancel()
        if not arrival.admitted:
            self._complain(ip, "crowded", arrival.reason)
            with contextlib.suppress(OSError):
                sock.send(encode_reject(RejectCode.PENDING))
            _close_politely(sock)
            return
        task = self._loop.create_task(self._visit(sock, ip))
        self._visits[sock] = task

        def forget(done: asyncio.Task[None]) -> None:
            self._pool.leave(sock)
            self._visits.pop(sock, None)
            if done.cancelled():  # perhaps before it ran at all
                sock.close()

        task.add_done_callback(forget)

    # -- one connection ---------------------------------------------------------------------------

    async def _visit(self, sock: socket.socket, ip: str) -> None:
        link = None
        try:
            link = await self._welcome(sock, ip)
        except AuthenticationFailed:
            self._complain(ip, "authentication", f"authentication failed with host {ip}: it does not know the secret")
        except HandshakeError as error:
            self._complain(ip, error.code, str(error))
        except MlxcelError as error:
            self._complain(ip, error.code, f"host {ip}: {error}")
        except TimeoutError:
            self._complain(ip, "slow", f"host {ip} did not finish the handshake in time")
        except OSError as error:
            self._complain(ip, "broken", f"host {ip} broke the handshake off: {error.strerror}")
        finally:
            if link is None:
                _close_politely(sock)
        if link is not None:
            await self._hand_over(link)

    async def _hand_over(self, link: Link) -> None:
        try:
            result = self._on_link(link)
            if inspect.isawaitable(result):
                await result
        except Exception as error:  # noqa: BLE001  # whatever the taker did wrong, the listener goes on
            log.error("%r could not be taken over: %s", link, trail(error))
            link.close()

    async def _welcome(self, sock: socket.socket, ip: str) -> Link:
        """The whole of the handshake, the verdict, and the first control frames."""
        loop = asyncio.get_running_loop()
        due = loop.time() + times.HANDSHAKE_S
        async with asyncio.timeout_at(due):
            first = await loop.sock_recv(sock, MAX_MESSAGE)
        # Keys are made for those who say something: most of a flood never does.
        handshake = ServerHandshake(self._own(), self._secrets, where=f"host {ip}")
        try:
            async with asyncio.timeout_at(due):
                await self._until_proof(sock, handshake, first)
            guest = await self._judge(sock, handshake, ip)
        except HandshakeError:
            if data := handshake.data_to_send():
                with contextlib.suppress(OSError):
                    sock.send(data)
            raise
        peer, established = handshake.peer, handshake.established
        assert peer is not None
        assert established is not None
        self._pool.leave(sock)
        try:
            async with asyncio.timeout(times.HANDSHAKE_S):
                await loop.sock_sendall(sock, handshake.data_to_send())
                link = await open_link(
                    sock,
                    established,
                    where=f"{peer.node_id} (host {ip})",
                    dialled=False,
                    hello=self._hello,
                    rekey_every=self._rekey_every,
                    shapes=self._shapes,
                )
        except BaseException:
            self.admission.leave(guest)
            raise
        self.counts["established"] += 1
        if handshake.secret_index:
            # Whoever replaces the secret wants to know who has not been told yet.
            self._complain(ip, "older-secret", f"{peer.node_id} (host {ip}) comes with the older secret")
        else:
            self._complaints.forget(ip)
        guest.settle(link)
        link.at_end(lambda: self._left(guest))
        return link

    async def _until_proof(self, sock: socket.socket, handshake: ServerHandshake, received: bytes) -> None:
        """Hear the client out, `received` being what it said first."""
        loop = asyncio.get_running_loop()
        while True:
            if not received:
                handshake.receive_eof()
            handshake.receive_data(received)
            if handshake.state is not State.AWAITING_CLIENT_HELLO:
                self._pool.hello_received(sock)
            if data := handshake.data_to_send():
                await loop.sock_sendall(sock, data)
            if handshake.state is State.AWAITING_VERDICT:
                return
            received = await loop.sock_recv(sock, handshake.room)

    async def _judge(self, sock: socket.socket, handshake: ServerHandshake, ip: str) -> Guest:
        """Give the verdict; raises what was refused."""
        peer, visit = handshake.peer, asyncio.current_task()
        assert peer is not None
        assert visit is not None
        own = self._own()
        if peer.node_id == own.node_id and peer.incarnation != own.incarnation:
            # From nowhere: what is sent to this id, or by it, would be two nodes' affair.
            detail = f"{own.node_id} is the id of this node itself and nobody else's, from any address"
            handshake.verdict(VerdictCode.IDENTITY, detail)
            raise Refused(f"{peer.node_id} (host {ip}) was refused: {detail}")
        decision = await self._decide(peer.node_id, peer.incarnation, ip)
        self._check_silence(sock, handshake)
        handshake.verdict(decision.verdict, decision.detail)
        if decision.verdict is not VerdictCode.ACCEPTED:
            raise Refused(f"{peer.node_id} (host {ip}) was refused: {decision.detail}")
        guest = Guest(visit)
        self.admission.enter(guest, peer.node_id, peer.incarnation, ip)
        return guest

    async def _decide(self, node_id: str, incarnation: bytes, ip: str) -> Decision:
        """What admission says, once it is known whether another process that has the id is alive."""
        decision = self.admission.ask(node_id, incarnation, ip)
        if decision.verdict is VerdictCode.IDENTITY and node_id in self._names.nodes:
            await self._learn(node_id)  # its name may lead here by now
            decision = self.admission.ask(node_id, incarnation, ip)
        if decision.contested:
            holders = self.admission.holding(node_id)
            # Whoever came since then has just proved itself alive, and so is the process that it belongs to.
            if not await any_alive(holders) and self.admission.holding(node_id) <= holders:
                for holder in holders:
                    self.admission.leave(holder)
                    holder.dismiss("does not answer: its place goes to a newer process")
            decision = self.admission.ask(node_id, incarnation, ip)
        return decision

    async def admit(self, link: Link) -> None:
        """Tie the peer of `link`, which this node has dialled, to its id until the link ends, as one that came in is.

        Raises:
            Refused: the id belongs to another process, or another address, that is alive. The link is not touched.
        """
        self._loop = asyncio.get_running_loop()
        peer = link.peer
        decision = await self._decide(peer.node_id, peer.incarnation, peer.address[0])
        if decision.verdict in (VerdictCode.IDENTITY, VerdictCode.DUPLICATE):
            raise Refused(
                f"whoever answers as {peer.node_id} at {peer.address[0]} is not taken for it: {decision.detail}",
                node=peer.node_id,
            )
        guest = Guest()
        self.admission.enter(guest, peer.node_id, peer.incarnation, peer.address[0], dialled=True)
        guest.settle(link)
        link.at_end(lambda: self._left(guest))

    async def _learn_names(self) -> None:
        """Where the configured names lead, so that their nodes are known before they come."""
        await asyncio.gather(*(self._learn(node_id) for node_id in self._names.nodes))

    async def _learn(self, node_id: str) -> None:
        found = await self._names.addresses(node_id)
        self.admission.learn(node_id, found)
        self._pool.trusted |= {normal_ip(ip) for ip in found}

    @staticmethod
    def _check_silence(sock: socket.socket, handshake: ServerHandshake) -> None:
        """A client that sends before it has the verdict, or has gone meanwhile, is not admitted."""
        try:
            early = sock.recv(1)
        except BlockingIOError:
            return
        if not early:
            raise HandshakeError("the client left before the verdict")
        handshake.receive_data(early)

    # -- bookkeeping ------------------------------------------------------------------------------

    def _own(self) -> Identity:
        identity = self._identity() if callable(self._identity) else self._identity
        if identity.data_addr or self.address is None or self.address.is_wildcard:
            return identity
        return dataclasses.replace(identity, data_addr=str(self.address))

    def _left(self, guest: Guest) -> None:
        """Its link has ended; called from any thread: links end where their drivers run, and perhaps after the loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.admission.leave, guest)

    def _complain(self, ip: str, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if self._on_mismatch is not None and kind in MISMATCHES:
            self._on_mismatch(text)
            return
        if self._complaints.due(ip, kind, time.monotonic()):
            log.warning("%s", text)


def _close_politely(sock: socket.socket) -> None:
    """Close so that what was sent last arrives: unread input would turn the end into a reset."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        sock.recv(MAX_MESSAGE)
    sock.close()
