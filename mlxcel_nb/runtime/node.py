"""A node: one listener, one loop for everything slow, one MLX thread.

`Node` may be used from any thread. What arrives on control links is handled on the loop and handed to the MLX
thread as commands. Trust: every peer has proved the cluster secret; loads and requests are taken only from a
`router`, a cancel only from the router whose request it is, aborts only from the instance's leader and failures only
from its members, on the links that were made for this instance.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.membership import Change
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.cluster.transports import HostFacts
from mlxcel_nb.errors import ClusterError, MlxcelError, WireError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.discovery.beacons import Announcement
from mlxcel_nb.net.interfaces.probe import probe
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.net.measuring import pair as measuring
from mlxcel_nb.net.pool import pool
from mlxcel_nb.net.pool.introduction import introduced
from mlxcel_nb.net.pool.pool import Pool
from mlxcel_nb.runtime import status
from mlxcel_nb.runtime.commands import Kv, Open, Outbox, Stop, kv_question
from mlxcel_nb.runtime.finding import Finding
from mlxcel_nb.runtime.gathering import Pair, gather_links
from mlxcel_nb.runtime.handoff.joining import Joining
from mlxcel_nb.runtime.handoff.orders import JoinOrder
from mlxcel_nb.runtime.hashing import Hashing
from mlxcel_nb.runtime.holding import Holding
from mlxcel_nb.runtime.measuring import Measuring
from mlxcel_nb.runtime.node_config import NodeConfig
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder, OpenOrder, failed_end
from mlxcel_nb.runtime.protocol import field as field_of
from mlxcel_nb.runtime.rendezvous import Rendezvous
from mlxcel_nb.runtime.requests import Requests
from mlxcel_nb.runtime.stuck import StuckWatch
from mlxcel_nb.runtime.surroundings import Surroundings
from mlxcel_nb.runtime.worker import Worker
from mlxcel_nb.util import times
from mlxcel_nb.util.log import get_logger
from mlxcel_nb.util.loop import LoopThread
from mlxcel_nb.wire.handshake import Identity
from mlxcel_nb.wire.hello import suite_number

log = get_logger("runtime.node")


class Node:
    """The runtime of one node, from `start` to `stop`.

    Args:
        secrets: see `use_secrets`, which replaces them.
        on_change: told of each change in a peer's state, on the node's loop; it must not block.
        on_unseen: told there why a peer was never reached, once a reason: its id or address, and the reason.
        probe: asks the system for the host's interfaces, on a thread.
    """

    def __init__(
        self,
        config: NodeConfig,
        secrets: Secrets,
        *,
        on_change: Callable[[Change], None] | None = None,
        on_unseen: Callable[[str, str], object] | None = None,
        probe: Callable[[], HostFacts] = probe,
    ) -> None:
        self.config = config
        self._surroundings = Surroundings(config.node_id, transport=config.transport, probe=probe)
        self._on_change = on_change
        self._on_unseen = on_unseen
        self._incarnation = new_incarnation()
        shapes = config.links.seen_from(config.node_id)
        self._dialler = Dialler(identity=self._identity, secrets=secrets, shapes=shapes)
        self._measuring = Measuring(self._dialler)
        self._io = LoopThread(f"node-io-{config.node_id}")
        self._hashing = Hashing(config.node_id, self._io.soon)
        self._worker = Worker(
            config.node_id,
            Outbox(
                to_router=self._hop(self._tell_routers),
                stream=self._hop(self._stream),
                to_leader=self._hop(self._tell_leader),
                to_members=self._hop(self._tell_members),
                to_reader=lambda message: self._io.soon(self._joining.ask, message),
                broken=lambda instance, node_id: self._io.soon(self._joining.broken, instance, node_id),
                died=self._hop(self._on_death),
                trouble=lambda: self._io.soon(self._stuck.trouble),
            ),
            threads=config.threads,
        )
        self._stuck = StuckWatch(self._worker, lambda error: self._on_death(error.to_dict()))
        self._requests = Requests(self._worker)
        self._rendezvous = Rendezvous()
        self._holding = Holding(
            config.node_id,
            self._worker,
            soon=self._io.soon,
            gather=self._gather,
            rendezvous=self._rendezvous,
            dial=self._dial,
            drive=lambda link: self._control(link, measure=True),
        )
        self._joining = Joining(
            config.node_id, self._worker, self._rendezvous, self._requests,
            dialler=self._dialler, allow=self._allow, drive=self._control, soon=self._io.soon,
        )  # fmt: skip
        self._listener: Listener | None = None
        self._pool: Pool | None = None
        self._finding: Finding | None = None
        self._address: Address | None = None
        self._routers: set[ControlLink] = set()
        self._controls: weakref.WeakSet[ControlLink] = weakref.WeakSet()
        """Every control link that is open, whoever is at its other end; the loop holds on to those."""
        self._router_seen = time.monotonic()
        self._guarding: asyncio.Task[None] | None = None
        self._introductions: list[asyncio.Task[None]] = []
        self.stopped = threading.Event()

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> Address:
        """Bind the listener and start the MLX thread; the address peers dial."""
        self._address = self._io.call(self._start(), timeout=times.HANDSHAKE_S, what="the data plane's listener")
        self._worker.start()
        return self._address

    async def _start(self) -> Address:
        config = self.config
        self._listener = Listener(
            self._identity,
            self._dialler.secrets,
            on_link=self._on_link,
            configured=config.sources,
            shapes=self._dialler.shapes,
        )
        address = self._address = await self._listener.start(config.bind, config.port, config.port_range)
        # Peers may have this node at the address it listens on, and at no other.
        self._dialler.source = self._listener.bound
        self._surroundings.listen(self._listener.bound, address.port)
        if config.peers or config.strangers or config.discover:
            made = self._pool = self._open_pool()
            loop = asyncio.get_running_loop()
            self._introductions = [loop.create_task(self._meet(made, each)) for each in config.strangers]
        if config.discover and self._pool is not None:
            self._finding = self._announce(self._pool, address)
            await self._finding.start()
        if config.orphan_guard:
            self._guarding = asyncio.get_running_loop().create_task(self._guard())
        return address

    def stop(self) -> None:
        """Drop the model, close every link, end both threads."""
        if self.stopped.is_set():
            return
        self._worker.fail("", ClusterError("the node is stopping", node=self.config.node_id))
        self._worker.post(Stop())
        try:
            self._io.call(self._stop(), timeout=times.HANDSHAKE_S, what="the node's links to close")
        finally:
            self._io.close()
            self.stopped.set()

    async def _stop(self) -> None:
        if self._listener is not None:
            await self._listener.close()  # first: a peer that is told goodbye may knock again at once
        if self._guarding is not None:
            self._guarding.cancel()
        if self._finding is not None:
            self._finding.stop()
        for each in (self._stuck, self._measuring, self._hashing, self._joining, self._holding):
            each.close()
        self._rendezvous.close()
        self._surroundings.close()
        for introduction in self._introductions:
            introduction.cancel()
        if self._pool is not None:
            await self._pool.close()
        for link in list(self._controls):
            link.close("node stops")

    def use_secrets(self, secrets: Secrets) -> None:
        """From now on let in, dial, announce and hear with these; connections that stand are not touched. Any thread
        but the node's loop.
        """
        self._io.call(self._use_secrets(secrets), timeout=times.PING_S, what="the node to take new secrets")

    async def _use_secrets(self, secrets: Secrets) -> None:
        self._dialler.secrets = secrets
        if self._listener is not None:
            self._listener.use(secrets)
        if self._finding is not None:
            self._finding.use(secrets)

    async def _guard(self) -> None:
        """An engine whose notebook is gone must not live on."""
        while time.monotonic() - self._router_seen < times.ORPHAN_S:
            await asyncio.sleep(times.PING_S)
            if self._routers:
                self._router_seen = time.monotonic()
        log.warning("no router for %g s: this node ends", times.ORPHAN_S)
        os._exit(0)

    def _identity(self) -> Identity:
        config = self.config
        return Identity(
            cluster=config.cluster,
            node_id=config.node_id,
            role=config.role,
            data_addr=str(self._surroundings.published(self._address)) if self._address else "",
            incarnation=self._incarnation,
            suite=suite_number(config.suite),
            transports=self._surroundings.transports,
        )

    async def _meet(self, made: Pool, address: Address) -> None:
        """Learn who listens at `address`, and keep a connection to it."""
        node_id = await introduced(self._dialler, address, own=self._address, on_unseen=self._on_unseen)
        if node_id is not None:
            made.add(node_id, [address])

    def _open_pool(self) -> Pool:
        assert self._listener is not None
        made = Pool(
            self._dialler,
            on_message=self._on_message,
            on_stream=self._on_stream,
            on_change=self._peer_changed,
            on_unseen=self._on_unseen,
            progress=lambda: (status.progress(self._worker), self._worker.activity != "idle"),
            load=lambda: status.load_figures(self._worker),
            announce=self._surroundings.addresses,
            admit=self._listener.admit,
        )
        for node_id, addresses in self.config.peers.items():
            made.add(node_id, addresses)
        return made

    def _announce(self, made: Pool, address: Address) -> Finding:
        """Discovery, which brings its peers to the pool."""
        me = self._identity()
        announcement = Announcement(node_id=me.node_id, role=me.role, incarnation=me.incarnation, listens=address)
        return Finding(
            made, self.config.cluster, self._dialler.secrets, announcement, self.config.peers, self._surroundings
        )

    def _peer_changed(self, change: Change) -> None:
        if self._finding is not None:
            self._finding.state_changed(change)
        if self._on_change is not None:
            self._on_change(change)

    async def _dial(self, node_id: str, address: Address, hello: Mapping[str, Any]) -> Link:
        """A link to `node_id`, as this node makes them."""
        return await self._dialler.dial(address, expect_node_id=node_id, hello=hello)

    def _gather(self, order: LoadOrder, me: int) -> Coroutine[Any, Any, dict[int, Pair]]:
        """The links that member `me` of `order` needs; the others may come from where the order has them come from."""
        self._allow(order.sources(me))
        return gather_links(order, me, self._dialler, self._rendezvous)

    def _allow(self, sources: Mapping[str, set[str]]) -> None:
        if self._listener is not None:
            self._listener.admission.allow(sources)

    def _hop(self, function: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """`function`, called on the loop whichever thread asks."""
        return lambda message: self._io.soon(function, message)

    # -- what the MLX thread says, on the loop ----------------------------------------------------

    def _tell_routers(self, message: dict[str, Any]) -> None:
        for link in list(self._routers):
            link.send(message)

    def _stream(self, message: dict[str, Any]) -> None:
        self._requests.stream(message)

    def _tell_leader(self, message: dict[str, Any]) -> None:
        self._holding.tell_leader(message)

    def _tell_members(self, message: dict[str, Any]) -> None:
        self._holding.tell_members(message)

    def _on_death(self, error: dict[str, Any]) -> None:
        """The MLX thread has ended or is stuck: whoever waits for it hears so, and the other members lose this one."""
        self._requests.fail_all(error)
        if self._holding.order is not None:
            self._tell_routers({"type": "error", "id": self._holding.order.id, "error": error})
        self._holding.died()

    # -- links, on the loop -----------------------------------------------------------------------

    def _on_link(self, link: Link) -> None:
        hello = link.peer.hello
        kind, instance = hello.get("link", "control"), hello.get("instance", "")
        if kind in ("hot", "witness"):
            self._rendezvous.arrived((str(instance), link.peer.node_id, str(kind)), link)
            return
        if self._joining.on_link(link):
            return
        if kind == measuring.LINK:
            self._measuring.arrived(link)
            return
        if kind == pool.LINK and self._pool is not None and self._pool.take(link):
            return
        control = self._control(link)
        if link.peer.role == "router":
            self._routers.add(control)

    def _control(self, link: Link, *, measure: bool = False) -> ControlLink:
        control = ControlLink(
            link, on_message=self._on_message, on_stream=self._on_stream, on_state=self._on_state, measure=measure
        )
        self._controls.add(control)
        return control

    def _on_stream(self, link: ControlLink, message: dict[str, Any]) -> None:
        """Nobody streams to a node of this kind."""

    def _on_state(self, link: ControlLink, state: str, reason: str) -> None:
        if state not in ("dead", "closed"):
            return
        self._measuring.left(link)
        self._hashing.left(link)
        self._joining.on_end(link)
        if link in self._routers:
            self._routers.discard(link)
            self._router_seen = time.monotonic()
            self._holding.router_left(link)
            self._requests.cancel_all(link)
            self._worker.post(Kv({"what": "left"}, link.peer.node_id, lambda _answer: None))
        self._holding.witnesses.ended(link, reason)

    def _on_message(self, link: ControlLink, message: dict[str, Any]) -> None:
        try:
            if link in self._routers and self._obey(link, message):
                return
            if self._joining.on_message(link, message):
                return
            self._answer(link, message)
        except MlxcelError as error:
            if message.get("type") != "error":  # two nodes that refuse each other's refusals would never end
                self._refuse(link, message, error)

    def _refuse(self, link: ControlLink, message: dict[str, Any], error: MlxcelError) -> None:
        details = error.at(self.config.node_id).to_dict()
        if message.get("type") == "generate":
            link.send_stream(failed_end(message.get("id"), details))
        else:
            link.send({"type": "error", "id": message.get("id"), "error": details})

    def _obey(self, router: ControlLink, message: dict[str, Any]) -> bool:
        """Do what a router ordered; False for what is no order."""
        kind = message.get("type")
        if kind in ("load", "unload", "generate"):
            self._stuck.check()
        if kind == "load":
            self._holding.load(LoadOrder.from_dict(message), router)
            self._requests.refused = 0
        elif kind == "digest":
            self._hashing.order(router, message)
        elif kind == "unload":
            self._hashing.left(router)
            stop, instance = self._requests.cancel_all, str(message.get("instance", ""))
            if self._holding.holds(instance):
                self._joining.close()
            self._holding.unload(router, field_of(message, "id", str), instance, stop)
        elif kind == "open":
            self._holding.check_leads(field_of(message, "instance", str))
            self._worker.post(Open(OpenOrder.from_dict(message)))
        elif kind == "join":
            order = JoinOrder.from_dict(message)
            me, leads = self._holding.member(order.instance)
            self._joining.join(order, me, leads, router)
        elif kind == "generate":
            asked = GenerateOrder.from_dict(message)
            self._holding.check_leads(asked.instance)
            self._requests.take(asked, router)
        elif kind == "cancel":
            self._requests.cancel(field_of(message, "id", str), router)
        elif kind == "recorded":
            from mlxcel_nb.runtime import recording  # brings MLX, which is there when a model is

            piece = recording.answer(self._worker.recording, message)
            router.send({"type": "reply", "id": field_of(message, "id", str), "recorded": piece})
        elif kind == "kv":
            self._worker.post(kv_question(router, message, self._io.soon))
        elif kind == "spans":
            reading = self._worker.spans.read(field_of(message, "since", int)).to_dict()
            router.send({"type": "reply", "id": field_of(message, "id", str), "spans": reading})
        else:
            return False
        return True

    def _answer(self, link: ControlLink, message: dict[str, Any]) -> None:
        """What members may say, each on the link that was made for it."""
        kind = message.get("type")
        if kind == "status":
            link.send({"type": "reply", "id": field_of(message, "id", str), "status": self.status()})
        elif kind == "place":
            self._surroundings.answer(link, field_of(message, "id", str))
        elif kind == "measure":
            self._measuring.order(link, message)
        elif kind == "addresses" and self._listener is not None:
            told = field_of(message, "addresses", list)
            self._listener.admission.announce(link.peer.node_id, link.peer.incarnation, told)
        elif kind == "heartbeat":
            pass  # of one that has this node among its peers, without being one of its own
        elif self._holding.on_message(link, message):
            pass
        elif not (self._holding.is_member(link) and self._joining.on_member(link, message)):
            raise WireError(f"{link.peer.node_id} ({link.peer.role}) may not send {kind!r} here")

    # -- status -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What this node is doing, as plain data."""
        config, worker = self.config, self._worker
        return {
            "node_id": config.node_id,
            "role": config.role,
            "address": str(self._surroundings.published(self._address)) if self._address else "",
            "threads": config.threads,
            "blas": config.blas,
            **status.host_facts(),
            "surroundings": self._surroundings.report(),
            **status.worker_facts(worker),
            "requests": len(self._requests),
            "work": status.work_facts(worker, self._requests.refused),
            "links": status.link_facts(self._holding.witnesses.links, worker),
            "peers": self._pool.info() if self._pool else {},
            "discovery": self._finding.info() if self._finding else None,
            "model": status.model_facts(worker, self._holding.order),
        }
