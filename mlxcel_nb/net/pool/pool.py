"""Lasting connections to the peers of a node, one each, made before anybody needs them. On an asyncio loop.

The pool dials every peer it was told of and dials again whenever the connection is gone, with growing pauses. So
nobody who has something to say waits for a handshake, except where a connection turns out to have been cut in
silence: then the request goes once more, over a fresh one.

Both sides may dial. Of two connections between the same two processes the one that was dialled by the lower node id
stays; both sides know this by themselves, and the one that dialled the other closes it after a while. The higher id
lets the lower go first.

Peers are members. What comes from them goes to `on_message`, but for answers to requests made here and heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import (
    Beat,
    Change,
    Ended,
    Event,
    Heard,
    Linked,
    Membership,
    Signal,
    State,
    Unreachable,
)
from mlxcel_nb.errors import HandshakeError, MlxcelError, PeerLost, StepTimeout
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.control.questions import Message, Questions, unless_error
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.pool.backoff import UNSEEN_AFTER, Backoff
from mlxcel_nb.net.pool.peer import Peer
from mlxcel_nb.util import times
from mlxcel_nb.util.log import get_logger

log = get_logger("net.pool")

ANSWER_S = 5.0
"""A request is answered within this, a retry on a fresh connection included."""

REQUEST_TRIES = 4
"""Further attempts to connect that a request makes before it is given up: a second and a half in all."""

HEAD_START_S = 0.25
"""For the peer of the lower id to dial first."""

RETIRE_S = 2.0
"""A connection that is one too many is closed after this: what was asked on it is answered by then."""

STEADY_S = 10.0
"""A connection that lasted less than this was no success: the pauses go on growing."""

LINK = "peer"
"""What a pool's connections say they are for, in their first message."""

MOST_FIGURES = 32
"""In a heartbeat, and characters of the name of one."""


class Pool:
    """The connections, and the membership they feed.

    Args:
        dialler: makes the connections.
        on_message: takes what is neither an answer nor a heartbeat; a `WireError` ends the link.
        on_stream: takes stream messages; without it they end the link.
        on_change: told of each change in a peer's state.
        on_unseen: told why a peer was never reached, once a reason: its id, and the reason.
        progress: a counter of what is done and whether there is work, for our own heartbeats.
        load: figures by name, for them as well.
        announce: the addresses of this host, which peers are told of.
        admit: asked about each connection that was made here: raises `Refused` where the peer's id is another's.
    """

    def __init__(
        self,
        dialler: Dialler,
        *,
        on_message: Callable[[ControlLink, Message], None],
        on_stream: Callable[[ControlLink, Message], None] | None = None,
        on_change: Callable[[Change], None] | None = None,
        on_unseen: Callable[[str, str], object] | None = None,
        progress: Callable[[], tuple[int, bool]] = lambda: (0, False),
        load: Callable[[], Mapping[str, float]] = dict,
        announce: Callable[[], Sequence[str]] = tuple,
        admit: Callable[[Link], Awaitable[None]] | None = None,
    ) -> None:
        self._dialler = dialler
        self._on_message = on_message
        self._on_stream = on_stream
        self._on_change = on_change
        self._on_unseen = on_unseen
        self._progress = progress
        self._load = load
        self._announce = announce
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._peers: dict[str, Peer] = {}
        self._guests: set[ControlLink] = set()  # of nodes that have this one among their peers, and are none here yet
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._questions = Questions()
        self._closed = False
        self.membership = Membership(self._loop.time())
        self._beat_due = self._loop.time()
        self._timer = self._loop.call_later(times.PING_S, self._tick)

    # -- what the owner calls ---------------------------------------------------------------------

    def add(self, node_id: str, addresses: Sequence[Address]) -> None:
        """Keep a connection to `node_id`, which listens at one of `addresses`, the best first."""
        if node_id in self._peers:
            self._peers[node_id].addresses = tuple(addresses)
            return
        peer = self._peers[node_id] = Peer(node_id, tuple(addresses), self._dialler.identity().node_id < node_id)
        self.membership.expect([node_id], self._loop.time())
        for link in [each for each in self._guests if each.peer.node_id == node_id]:
            self._guests.discard(link)
            self._join(peer, link)
        self._keepers[node_id] = self._loop.create_task(self._keep(peer))

    def remove(self, node_id: str) -> None:
        """`node_id` is no peer any more: its connections are closed."""
        peer = self._peers.pop(node_id, None)
        if peer is not None:
            self._keepers.pop(node_id).cancel()
            peer.cancel()
            self.membership.forget(node_id)
            for link in list(peer.links):
                link.close("no peer any more")

    def take(self, link: Link) -> bool:
        """Whether the pool wants `link`, which another node's pool has made; then it belongs to this one.

        It may come before this node has heard of the other: it is the peer's connection as soon as that is `add`ed.
        """
        if self._closed:
            return False
        peer, control = self._peers.get(link.peer.node_id), self._drive(link)
        if peer is None:
            self._guests.add(control)
        else:
            self._join(peer, control)
        return True

    def send(self, node_id: str, message: Message) -> None:
        """Send a message that has no answer.

        Raises:
            PeerLost: there is no connection at this moment.
        """
        self._link(node_id).send(message)

    async def request(self, node_id: str, message: Message, *, within_s: float = ANSWER_S) -> Message:
        """The answer to `message`, which may reach the peer twice: only what is safe to repeat is asked this way.

        A connection on which nothing at all is heard for `times.PROBE_S` was cut in silence; the request then goes
        once more, over a fresh one.

        Raises:
            PeerLost: no connection can be had. StepTimeout: the peer is there and does not answer in time.
            HandshakeError: the peer cannot be let in, or does not let us in. MlxcelError: what the peer answered.
        """
        peer = self._peer(node_id)
        what = f"an answer to {message.get('type')!r}"
        try:
            async with asyncio.timeout(within_s):
                return unless_error(await self._ask(peer, message))
        except TimeoutError:
            raise StepTimeout(f"waited {within_s:g} s for {what}", node=node_id) from None

    def info(self) -> dict[str, dict[str, Any]]:
        """Each peer as plain data: its state, and the path to it."""
        now = self._loop.time()
        found = {}
        for node_id, peer in self._peers.items():
            member = self.membership.members[node_id]
            still_s = member.still_s(now)
            found[node_id] = {
                "state": member.state.shown if still_s is None else "stalled",
                "since_s": now - member.since,
                "reason": member.reason if still_s is None else f"no progress for {still_s:.0f} s",
                "incarnation": member.incarnation.hex(),
                "progress": member.progress,
                "busy": member.busy,
                "load": dict(member.load),
                "heartbeat_s": None if member.beat_at is None else now - member.beat_at,
                "addresses": [str(address) for address in peer.addresses],
                "failed_attempts": peer.backoff.failed,
                "link": peer.best.info() if peer.best else None,
            }
        return found

    async def close(self) -> None:
        """Close every connection politely."""
        self._closed = True
        self._timer.cancel()
        keepers = list(self._keepers.values())
        for keeper in keepers:
            keeper.cancel()
        for peer in self._peers.values():
            peer.cancel()
            for link in list(peer.links):
                link.close("node stops")
        for link in list(self._guests):
            link.close("node stops")
        self._questions.fail(PeerLost("this node stops"))
        await asyncio.gather(*keepers, return_exceptions=True)

    # -- requests ---------------------------------------------------------------------------------

    def _peer(self, node_id: str) -> Peer:
        if (peer := self._peers.get(node_id)) is None:
            raise PeerLost("is not among this node's peers", node=node_id)
        return peer

    def _link(self, node_id: str) -> ControlLink:
        link = self._peer(node_id).best
        if link is None:
            member = self.membership.members[node_id]
            raise PeerLost(f"{member.state.shown}: {member.reason}", node=node_id)
        return link

    async def _ask(self, peer: Peer, message: Message) -> Message:
        link = peer.best or await self._connected(peer)
        answer = await self._ask_on(link, message)
        if answer is None:
            if link.open:  # nothing says that the peer is dead, only that this connection is
                await self._attempt(peer)
                link.give_up(f"nothing heard for {times.PROBE_S:g} s when it was asked something")
            answer = await self._ask_on(peer.best or await self._connected(peer), message)
        if answer is None:
            raise PeerLost("does not answer on a fresh connection either", node=peer.node_id)
        return answer

    async def _ask_on(self, link: ControlLink, message: Message) -> Message | None:
        """The answer over `link`, or None when the link has ended or shows no life."""
        with self._questions.ask(link, message) as answer:
            while link.open:
                asked = self._loop.time()
                link.nudge()
                await asyncio.wait([answer], timeout=times.PROBE_S)
                if answer.done():
                    return answer.result()
                if link.heard_at < asked:
                    return None
        return None

    async def _connected(self, peer: Peer) -> ControlLink:
        """The peer's connection, as soon as there is one; a few attempts are made for it."""
        backoff = Backoff(attempts=REQUEST_TRIES)
        while peer.best is None:
            try:
                await self._attempt(peer)
            except HandshakeError:
                raise  # somebody is there and says no: asking again does not help
            except MlxcelError as error:
                pause = backoff.next_s()
                if pause is None:
                    cause = f"no connection after {backoff.failed} attempts: {error.cause}"
                    raise PeerLost(cause, node=peer.node_id, advice=error.advice) from None
                await peer.linked_within(pause)
        return peer.best

    # -- connecting -------------------------------------------------------------------------------

    async def _keep(self, peer: Peer) -> None:
        """See to it that there is a connection whenever there can be one."""
        if not peer.dials_first:
            await peer.linked_within(HEAD_START_S)
        while True:
            while peer.best is None:
                try:
                    await self._attempt(peer)
                except MlxcelError as error:
                    self._log_failure(peer, error)
                    await peer.linked_within(peer.backoff.next_s() or 0.0)
            lost = await peer.lost()
            if self._loop.time() - peer.linked_at > STEADY_S:
                peer.backoff.reset()
            if not lost.cut or peer.backoff.failed:  # it said goodbye, or it never lasts: no hurry
                await peer.linked_within(peer.backoff.next_s() or 0.0)

    def _attempt(self, peer: Peer) -> asyncio.Future[None]:
        """One attempt to connect; whoever needs it at the same time shares it."""
        if peer.attempt is None or peer.attempt.done():
            peer.attempt = self._loop.create_task(self._dial(peer))
            peer.attempt.add_done_callback(lambda task: task.cancelled() or task.exception())  # perhaps nobody waits
        return asyncio.shield(peer.attempt)

    async def _dial(self, peer: Peer) -> None:
        try:
            link = await self._dialler.dial_node(peer.node_id, peer.addresses, {"link": LINK})
            await self._admitted(link)
        except MlxcelError as error:
            self._tell(Unreachable(node_id=peer.node_id, reason=error.cause))
            raise
        if self._peers.get(peer.node_id) is peer and not self._closed:
            self._join(peer, self._drive(link))
        else:
            link.close()

    async def _admitted(self, link: Link) -> None:
        if self._admit is None:
            return
        try:
            await self._admit(link)
        except BaseException as error:
            self._drive(link).close(error.cause if isinstance(error, MlxcelError) else "node stops")
            raise

    def _drive(self, link: Link) -> ControlLink:
        return ControlLink(
            link, on_message=self._message, on_stream=self._on_stream, on_state=self._state, measure=True
        )

    def _join(self, peer: Peer, control: ControlLink) -> None:
        """Let `control` be the peer's connection, unless another is."""
        for older in [each for each in peer.links if each.peer.incarnation != control.peer.incarnation]:
            older.close("a newer process has its place")
            peer.links.remove(older)
        spare = peer.join(control, self._loop.time())
        self._tell(Linked(node_id=peer.node_id, incarnation=control.peer.incarnation))
        if spare is not None and spare.link.dialled:
            self._loop.call_later(RETIRE_S, self._retire, peer, spare)
        self._send_beat(control)

    def _retire(self, peer: Peer, spare: ControlLink) -> None:
        """Close one that is too many, if there still is another."""
        if spare.open and any(link.open and link is not spare for link in peer.links):
            spare.close("another connection is in use")
            self._gone(spare, spare.reason, goodbye=True)

    def _log_failure(self, peer: Peer, error: MlxcelError) -> None:
        """A refusal, by either side, is said once, and so is why a peer was never there; the rest is in the status."""
        if isinstance(error, HandshakeError):
            if error.cause != peer.complaint:
                log.warning("%s", error)
                peer.complaint = error.cause
        elif self.membership.members[peer.node_id].state is State.UNSEEN and peer.backoff.failed >= UNSEEN_AFTER:
            if self._on_unseen is not None and error.cause not in peer.told:
                self._on_unseen(peer.node_id, error.cause)
            peer.told.add(error.cause)

    # -- what links say ---------------------------------------------------------------------------

    def _message(self, link: ControlLink, message: Message) -> None:
        if message.get("type") == "heartbeat":
            progress, busy = message.get("progress"), message.get("busy")
            self._tell(
                Beat(
                    node_id=link.peer.node_id,
                    incarnation=link.peer.incarnation,
                    progress=progress if isinstance(progress, int) else 0,
                    busy=busy is True,
                    load=_figures(message.get("load")),
                )
            )
        elif not self._questions.take(link, message):
            self._on_message(link, message)

    def _state(self, link: ControlLink, state: str, reason: str) -> None:
        self._hear(link)
        self._judge()
        if state in ("dead", "closed"):
            self._gone(link, reason, goodbye=state == "closed")

    def _gone(self, link: ControlLink, reason: str, *, goodbye: bool) -> None:
        node_id, incarnation = link.peer.node_id, link.peer.incarnation
        if link in self._guests:
            self._guests.discard(link)
            return
        if peer := self._peers.get(node_id):
            peer.leave(link)
        self._tell(Ended(node_id=node_id, incarnation=incarnation, reason=reason, goodbye=goodbye))

    # -- time -------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """Every second: what was heard, what was not, and our own heartbeat."""
        self._timer = self._loop.call_later(times.PING_S, self._tick)
        for peer in self._peers.values():
            for link in peer.links:
                self._hear(link)
        self._judge()
        if (now := self._loop.time()) >= self._beat_due:
            self._beat_due = now + times.HEARTBEAT_S
            for peer in self._peers.values():
                if peer.best is not None:
                    self._send_beat(peer.best)

    def _send_beat(self, link: ControlLink) -> None:
        progress, busy = self._progress()
        link.send({"type": "heartbeat", "progress": progress, "busy": busy, "load": dict(self._load())})
        if addresses := list(self._announce()):  # again and again: cables are plugged and leases change
            link.send({"type": "addresses", "addresses": addresses})

    def _hear(self, link: ControlLink) -> None:
        heard = Heard(node_id=link.peer.node_id, incarnation=link.peer.incarnation)
        self._changed(self.membership.apply(heard, link.heard_at))

    def _judge(self) -> None:
        self._changed(self.membership.judge(self._loop.time()))

    def _tell(self, event: Event) -> None:
        self._changed(self.membership.apply(event, self._loop.time()))

    def _changed(self, changes: list[Change]) -> None:
        for change in changes:
            log.info("%s is %s: %s", change.node_id, change.state.shown, change.reason)
            peer = self._peers.get(change.node_id)
            if peer is not None and change.state is State.DEAD and change.signal is Signal.SILENT:
                for link in list(peer.links):
                    link.give_up(change.reason)
            if self._on_change is not None:
                with contextlib.suppress(Exception):  # a listener's fault does not stop the pool
                    self._on_change(change)


def _figures(told: Any) -> dict[str, float]:
    """What a peer says of its load, as far as it can be read; it is kept, so it is kept small."""
    if not isinstance(told, dict):
        return {}
    figures = {name: value for name, value in told.items() if type(value) in (int, float) and math.isfinite(value)}
    return {name: figures[name] for name in list(figures)[:MOST_FIGURES] if len(name) <= MOST_FIGURES}
