"""Reaching another node: connect, prove, and hand back a `Link`. On an asyncio loop.

Errors tell three things apart that users mix up: nobody there ("offline"), somebody who does not know the secret
("authentication failed"), and somebody who said no for a reason.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxcel_nb.cluster.address import Address, parse_address
from mlxcel_nb.cluster.secret import Secret, Secrets
from mlxcel_nb.cluster.shape import Shapes
from mlxcel_nb.errors import AuthenticationFailed, HandshakeError, MlxcelError, PeerLost, WireError
from mlxcel_nb.net.links.link import BENT, Link
from mlxcel_nb.net.links.opening import open_link
from mlxcel_nb.net.links.sockets import SILENCE, connect, offline
from mlxcel_nb.util import times
from mlxcel_nb.wire.handshake import ClientHandshake, Identity, RejectCode, State

TRIES = 4
"""Attempts at a listener that closes before it says anything: it is crowded, or another program."""

PAUSE_S, MAX_PAUSE_S = 0.05, 0.4
"""Least pause before another attempt, which doubles up to the latter; by chance each is up to twice as long."""


class _Crowded(Exception):
    """The listener closed us before it said anything of itself: its pending pool is full.

    Args:
        told: it said so; else it may also be something else that closes connections.
    """

    def __init__(self, error: HandshakeError, *, told: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.told = told


@dataclass(kw_only=True)
class Dialler:
    """How one node reaches others: what all the connections it makes have in common. On one asyncio loop.

    Args:
        identity: what the node says of itself, asked afresh for every connection.
        secrets: the older one is tried once, on a connection of its own, when the current one is refused. They may be
            replaced at any time, for the connections that are made from then on.
        rekey_every: frames after which this side takes its next key; None for the wire's own limits.
        shapes: how what is sent to a node is shaped.
        source: the node's own IP address, which connections come from where they can; "" lets the system choose.
    """

    identity: Callable[[], Identity]
    secrets: Secrets
    rekey_every: int | None = None
    shapes: Shapes | None = None
    source: str = ""

    async def dial(
        self,
        address: Address | str,
        *,
        expect_node_id: str | None = None,
        hello: Mapping[str, Any] | None = None,
        deadline: float = times.HANDSHAKE_S,
        source: str | None = None,
    ) -> Link:
        """An established connection to the node at `address`, first control frames exchanged.

        Args:
            expect_node_id: refuse to talk to any other node.
            hello: merged into our first control frame, e.g. `{"link": "hot"}`.
            deadline: seconds for all of it.
            source: in place of the node's own.

        Raises:
            PeerLost: nobody there, or nobody who answers within `deadline`.
            AuthenticationFailed: one side does not know the secret.
            HandshakeError: any other reason why the two cannot talk.
        """
        to = parse_address(address) if isinstance(address, str) else address
        attempt = _Attempt(self, to, expect_node_id, hello, self.source if source is None else source)
        *tried_once, last = self.secrets
        try:
            async with asyncio.timeout(deadline):
                for candidate in tried_once:
                    try:
                        return await attempt.persist(candidate)
                    except HandshakeError as error:
                        if not (isinstance(error, AuthenticationFailed) or attempt.left_unanswered):
                            raise
                return await attempt.persist(last)
        except TimeoutError:
            if attempt.crowded is not None:
                raise attempt.crowded from None
            if not attempt.connected:
                raise offline(to, f"no answer within {deadline:g} s", SILENCE, node=expect_node_id) from None
            raise PeerLost(
                f"host {to} takes connections but did not finish the handshake within {deadline:g} s",
                node=expect_node_id,
                advice="Its process may be stopped or overloaded.",
            ) from None

    async def dial_node(self, node_id: str, addresses: Sequence[Address], hello: Mapping[str, Any]) -> Link:
        """A connection to `node_id`, at the first of its addresses where it answers; they share the time of one.

        Raises:
            MlxcelError: as `dial`, for the last of them.
        """
        last: MlxcelError = PeerLost("has no address", node=node_id, advice="Name one in the cluster file.")
        for address in addresses:
            try:
                share = times.HANDSHAKE_S / len(addresses)
                return await self.dial(address, expect_node_id=node_id, hello=hello, deadline=share)
            except MlxcelError as error:
                last = error
        raise last


async def dial(
    identity: Identity,
    secrets: Secret | Secrets,
    address: Address | str,
    *,
    expect_node_id: str | None = None,
    hello: Mapping[str, Any] | None = None,
    deadline: float = times.HANDSHAKE_S,
    rekey_every: int | None = None,
    shapes: Shapes | None = None,
) -> Link:
    """A single connection, of somebody who makes no other; see `Dialler`."""
    known = Secrets(secrets) if isinstance(secrets, Secret) else secrets
    dialler = Dialler(identity=lambda: identity, secrets=known, rekey_every=rekey_every, shapes=shapes)
    return await dialler.dial(address, expect_node_id=expect_node_id, hello=hello, deadline=deadline)


class _Attempt:
    """What every try of one `Dialler.dial` has in common."""

    def __init__(
        self,
        dialler: Dialler,
        address: Address,
        expect_node_id: str | None,
        hello: Mapping[str, Any] | None,
        source: str,
    ) -> None:
        self._dialler = dialler
        self._identity = dialler.identity()
        self._address = address
        self._where = f"host {address}"
        self._expect_node_id = expect_node_id
        self._hello = hello
        self._source = source
        self.connected = False
        self.crowded: HandshakeError | None = None
        """How the last attempt was turned away, where it was."""
        self.left_unanswered = False
        """Whether the server went away after this side's proof, which is one way to say that the secret is wrong."""

    async def persist(self, secret: Secret) -> Link:
        """Try, and again after a jittered moment while the listener is crowded: it says so, or closes in silence."""
        pause, silences = PAUSE_S, 0
        while True:
            try:
                return await self._once(secret)
            except _Crowded as turned_away:
                silences += not turned_away.told
                if silences == TRIES:
                    raise turned_away.error from None
                self.crowded = turned_away.error
            await asyncio.sleep(pause * (1 + random.random()))
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _once(self, secret: Secret) -> Link:
        self.connected = self.left_unanswered = False
        sock = await connect(self._address, node=self._expect_node_id, source=self._source)
        self.connected, self.crowded = True, None
        try:
            handshake = await self._shake_hands(sock, secret)
            assert handshake.established is not None
            try:
                return await open_link(
                    sock,
                    handshake.established,
                    where=self._where,
                    dialled=True,
                    hello=self._hello,
                    rekey_every=self._dialler.rekey_every,
                    shapes=self._dialler.shapes,
                )
            except WireError as error:
                if self._where in error.cause:
                    raise
                raise type(error)(f"{self._where}: {error.cause}", advice=error.advice or BENT) from None
        except ConnectionError as error:
            sock.close()
            raise HandshakeError(f"{self._where} broke the connection off: {error.strerror}") from None
        except BaseException:
            sock.close()
            raise

    async def _shake_hands(self, sock: socket.socket, secret: Secret) -> ClientHandshake:
        loop = asyncio.get_running_loop()
        handshake = ClientHandshake(self._identity, secret, expect_node_id=self._expect_node_id, where=self._where)
        ended = False
        try:
            while handshake.state is not State.ESTABLISHED:
                if data := handshake.data_to_send():
                    await loop.sock_sendall(sock, data)
                if received := await loop.sock_recv(sock, handshake.room):
                    handshake.receive_data(received)
                else:
                    ended = True
                    handshake.receive_eof()
        except ConnectionError as error:
            broken = HandshakeError(f"{self._where} broke the handshake off: {error.strerror}")
            self.left_unanswered = handshake.peer is not None
            if handshake.peer is None:
                raise _Crowded(broken) from None
            raise broken from None
        except AuthenticationFailed as error:
            why = "it does not know this cluster's secret" if error.local else "it does not accept this side's secret"
            raise _like(error, f"authentication failed with {self._where}: {why}") from None
        except HandshakeError as error:
            refusal = handshake.refusal
            turned_away = refusal and not refusal.authenticated and refusal.code == RejectCode.PENDING
            if turned_away or (ended and handshake.peer is None):
                raise _Crowded(error, told=bool(turned_away)) from None
            if ended:
                self.left_unanswered = True
                advice = "Its log says why; a different secret is the usual reason."
                raise HandshakeError(error.cause, advice=advice) from None
            raise
        return handshake


def _like(error: AuthenticationFailed, cause: str) -> AuthenticationFailed:
    """`error` in the words both ends use, with the host they can find."""
    told = AuthenticationFailed(cause, node=error.node, advice=error.advice)
    told.local = error.local
    return told
