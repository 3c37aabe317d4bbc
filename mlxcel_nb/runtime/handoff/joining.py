"""Opens the links between the members of instances that work together. On the node's loop.

The member that reads dials each member that goes on; the leader of those that go on dials the leader of those that
read. A link for caches that has ended is dialled again a few times, by whoever dialled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.errors import ClusterError, MlxcelError, WireError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.runtime.commands import Brought, Join, Landed, Sent
from mlxcel_nb.runtime.gathering import LINKS_S
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.handoff.fetching import Fetching
from mlxcel_nb.runtime.handoff.orders import JoinOrder, Peer
from mlxcel_nb.runtime.protocol import GenerateOrder, Member, field
from mlxcel_nb.runtime.rendezvous import Rendezvous
from mlxcel_nb.runtime.requests import Requests
from mlxcel_nb.runtime.worker import Worker
from mlxcel_nb.util import times
from mlxcel_nb.util.log import get_logger

log = get_logger("runtime.handoff")

CACHES = "kv"
"""What a link for caches is called in its first frame."""

LEADERS = "handoff"
"""And one from the leader of those that go on to the leader of those that read."""

AGAIN_S = (0.1, 0.5, 2.0)
"""Before a link for caches is dialled again."""


class Joining:
    """Of one node.

    Args:
        requests: takes what the leaders of other instances ask to be read.
        dialler: makes this side's connections.
        allow: told from which addresses nodes may come.
        drive: makes a control link of one that came.
        soon: calls a function on the loop, from any thread.
    """

    def __init__(
        self,
        node_id: str,
        worker: Worker,
        rendezvous: Rendezvous,
        requests: Requests,
        *,
        dialler: Dialler,
        allow: Callable[[Mapping[str, set[str]]], None],
        drive: Callable[[Link], ControlLink],
        soon: Callable[..., None],
    ) -> None:
        self._node_id = node_id
        self._worker = worker
        self._rendezvous = rendezvous
        self._requests = requests
        self._fetching = Fetching(lambda message: worker.post(Brought(message)))
        self._drive = drive
        self._leaders: set[ControlLink] = set()
        self._dialler = dialler
        self._allow = allow
        self._soon = soon
        self._order: JoinOrder | None = None
        self._me: Member | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asked: dict[str, ControlLink] = {}

    # -- what the node hears

    def on_link(self, link: Link) -> bool:
        """Take a link that came, if it is for this."""
        kind = link.peer.hello.get("link")
        if kind == CACHES:
            self._arrived(link)
        elif kind == LEADERS:
            self._leaders.add(self._drive(link))
        return kind in (CACHES, LEADERS)

    def on_message(self, link: ControlLink, message: dict[str, Any]) -> bool:
        """Do what the leader of another instance asks for; False for whoever is none, or asks for something else.

        Raises:
            WireError: it may not ask this node.
        """
        kind = message.get("type")
        if link not in self._leaders or kind not in ("generate", "cancel"):
            return False
        if kind == "cancel":
            self._requests.cancel(field(message, "id", str), link)
            return True
        order = GenerateOrder.from_dict(message)
        serves = self._order.serves if self._order is not None else ()
        asks = {peer.instance for peer in serves if peer.members[0].node_id == link.peer.node_id}
        if order.hand is None or order.hand.to not in asks:
            raise WireError(f"{link.peer.node_id} asks for a prompt to be read for an instance that it does not lead")
        self._requests.take(order, link)
        return True

    def on_end(self, link: ControlLink) -> None:
        """A control link of the node's has ended."""
        if link in self._leaders:
            self._leaders.discard(link)
            self._requests.cancel_all(link)

    def on_member(self, link: ControlLink, message: dict[str, Any]) -> bool:
        """Tell the MLX thread what a member says of what goes from one instance to another; False for all else."""
        kind, node_id = message.get("type"), link.peer.node_id
        if kind == "landed":
            self._worker.post(Landed(node_id, field(message, "epoch", int), field(message, "transfer", int)))
        elif kind == "sent":
            account, error = message.get("account"), message.get("error")
            self._worker.post(
                Sent(
                    node_id,
                    field(message, "to", str),
                    field(message, "transfer", int),
                    None if account is None else Account.from_list(account),
                    None if error is None else errors.from_dict(field(message, "error", dict)),
                )
            )
        else:
            return False
        return True

    # -- what the node tells

    def ask(self, message: dict[str, Any]) -> None:
        """Ask the leader of an instance that reads for this one."""
        self._fetching.ask(message)

    def join(self, order: JoinOrder, me: Member, leads: bool, router: ControlLink) -> None:
        """Open what `order` says; the router hears when all is there, or why not."""
        self.close()
        self._order, self._me = order, me
        self._allow(order.sources(me.node_id))
        self._asked[order.id] = router
        self._start(self._open(order, me, leads))

    def _arrived(self, link: Link) -> None:
        """A link for caches came: one that is waited for, or in place of one that has ended."""
        reader = str(link.peer.hello.get("from", ""))
        instance = self._worker.instance
        handoff = instance.handoff if instance is not None else None
        if handoff is not None and handoff.knows(reader, link.peer.node_id):
            handoff.take(reader, link.peer.node_id, link)
        else:
            self._rendezvous.arrived((str(link.peer.hello.get("instance", "")), link.peer.node_id, CACHES), link)

    def broken(self, instance: str, node_id: str) -> None:
        """A link for caches that this node dialled has ended."""
        if self._order is not None and self._me is not None:
            self._start(self._again(self._order, self._me, instance, node_id))

    def close(self) -> None:
        """No instance is held any more."""
        for task in list(self._tasks):
            task.cancel()
        self._fetching.close()
        self._order = self._me = None
        self._asked.clear()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, order: JoinOrder, me: Member, leads: bool) -> None:
        opened: dict[tuple[str, str], Link] = {}
        try:
            async with asyncio.timeout(LINKS_S):
                outgoing = {
                    (peer.instance, member.node_id): self._dial(order, me, member, peer.instance)
                    for peer in order.serves
                    for member in peer.members
                }
                incoming = {
                    (peer.instance, member.node_id): self._rendezvous.wait(
                        (order.instance, member.node_id, CACHES), LINKS_S
                    )
                    for peer in order.readers
                    for member in peer.members
                }

                async def keep(key: tuple[str, str], coming: Any) -> None:
                    opened[key] = await coming

                leading = [self._lead(order, me, peer) for peer in order.readers] if leads else []
                each = [keep(key, coming) for key, coming in (outgoing | incoming).items()]
                await asyncio.gather(*each, *leading)
        except BaseException as error:
            for link in opened.values():
                link.close()
            if isinstance(error, asyncio.CancelledError):
                raise
            self._tell(order, _as_error(error, self._node_id))
            return
        self._worker.post(
            Join(
                order,
                {key: opened[key] for key in outgoing},
                {key: opened[key] for key in incoming},
                lambda: self._soon(self._tell, order, None),
                lambda error: self._soon(self._tell, order, error),
            )
        )

    async def _dial(self, order: JoinOrder, me: Member, member: Member, instance: str) -> Link:
        """A link for caches, along the first way that leads there."""
        hello = {"link": CACHES, "instance": instance, "from": order.instance}
        return await self._along(order, me, member, hello)

    async def _lead(self, order: JoinOrder, me: Member, peer: Peer) -> None:
        hello = {"link": LEADERS, "instance": peer.instance}
        self._fetching.open(peer.instance, await self._along(order, me, peer.members[0], hello))

    async def _along(self, order: JoinOrder, me: Member, member: Member, hello: Mapping[str, Any]) -> Link:
        *others, last = order.between(me, member)
        for path in others:
            try:
                return await self._dialler.dial(
                    path.address, expect_node_id=member.node_id, hello=hello, source="" if path.source else None
                )
            except MlxcelError as error:
                log.info("no link to %s along %s: %s", member.node_id, path, error.cause)
        return await self._dialler.dial(
            last.address, expect_node_id=member.node_id, hello=hello, source="" if last.source else None
        )

    async def _again(self, order: JoinOrder, me: Member, instance: str, node_id: str) -> None:
        """Dial a link for caches once more; whoever is dead refuses at once."""
        member = next(
            m for peer in order.serves if peer.instance == instance for m in peer.members if m.node_id == node_id
        )
        for pause in AGAIN_S:
            await asyncio.sleep(pause)
            try:
                async with asyncio.timeout(times.HANDSHAKE_S):
                    link = await self._dial(order, me, member, instance)
            except (MlxcelError, TimeoutError) as error:
                log.info("no link for caches to %s: %s", node_id, error)
                continue
            held = self._worker.instance
            if held is None or held.handoff is None:
                link.close()
            else:
                held.handoff.take(instance, node_id, link)
            return

    def _tell(self, order: JoinOrder, error: MlxcelError | None) -> None:
        """Say once what has become of an order."""
        if (router := self._asked.pop(order.id, None)) is None:
            return
        if error is None:
            router.send({"type": "joined", "id": order.id})
        else:
            router.send({"type": "error", "id": order.id, "error": error.at(self._node_id).to_dict()})


def _as_error(error: BaseException, node_id: str) -> MlxcelError:
    if isinstance(error, TimeoutError):
        return ClusterError(f"the members of other instances were not there within {LINKS_S:g} s", node=node_id)
    return errors.wrap(error, node_id)
