"""A node: one listener, one loop for everything slow, one MLX thread.

`Node` may be used from any thread. What arrives on control links is handled on the loop and handed to the MLX
thread as commands. Trust: every peer has proved the cluster secret; loads and requests are taken only from a
`router`, a cancel only from the router whose request it is, aborts only from the instance's leader and failures only
from its members, on the links that were made for this instance.
"""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.errors import Busy, Cancelled, ClusterError, MlxcelError, PeerLost, WireError
from mlxcel_nb.net.aio import ControlLink
from mlxcel_nb.net.hot import MAX_SPIN_S, HotLink
from mlxcel_nb.net.link import Link
from mlxcel_nb.net.listener import Listener
from mlxcel_nb.runtime.gathering import Pair, gather_links
from mlxcel_nb.runtime.protocol import GenerateOrder, LoadOrder, failed_end, field
from mlxcel_nb.runtime.rendezvous import Rendezvous
from mlxcel_nb.runtime.worker import Generate, Load, Outbox, Stop, Unload, Worker
from mlxcel_nb.util import times
from mlxcel_nb.util.cores import usable_cores
from mlxcel_nb.util.log import get_logger
from mlxcel_nb.util.loop import LoopThread
from mlxcel_nb.wire.handshake import Identity

log = get_logger("runtime.node")

Gathering = asyncio.Task[dict[int, Pair]]

MAX_WAITING = 64
"""Requests that may wait for the one under way; one more is told the model is busy."""

MAX_WAITING_WEIGHT = 1 << 22
"""And this much in prompts: room for the largest request, or for 64 of a long context."""


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Who a node is and where it listens.

    Args:
        port: 0 lets the system choose; the address published is what was bound.
        orphan_guard: end the process when no router has been connected for `times.ORPHAN_S`.
        threads: cores for MLX on this node.
        blas: what `load_fast_blas` reported, for status.
    """

    cluster: str
    node_id: str
    role: str = "hybrid"
    bind: str = "127.0.0.1"
    port: int = 0
    port_range: tuple[int, int] | None = None
    orphan_guard: bool = True
    threads: int = 1
    blas: str = ""


class Node:
    """The runtime of one node, from `start` to `stop`."""

    def __init__(self, config: NodeConfig, secret: Secret) -> None:
        self.config = config
        self._secret = secret
        self._incarnation = new_incarnation()
        self._io = LoopThread(f"node-io-{config.node_id}")
        self._worker = Worker(
            config.node_id,
            Outbox(
                to_router=self._hop(self._tell_routers),
                stream=self._hop(self._stream),
                to_leader=self._hop(self._tell_leader),
                to_members=self._hop(self._tell_members),
                died=self._hop(self._on_death),
            ),
            threads=config.threads,
        )
        self._listener: Listener | None = None
        self._address: Address | None = None
        self._routers: set[ControlLink] = set()
        self._witnesses: dict[str, ControlLink] = {}
        self._rendezvous = Rendezvous()
        self._order: LoadOrder | None = None
        self._loading: Load | None = None
        self._requests: dict[str, tuple[Generate, ControlLink]] = {}
        self._router_seen = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gathering: dict[ControlLink, Gathering] = {}
        self.stopped = threading.Event()

    # -- life -------------------------------------------------------------------------------------

    def start(self) -> Address:
        """Bind the listener and start the MLX thread; the address peers dial."""
        self._address = self._io.call(self._start(), timeout=times.HANDSHAKE_S, what="the data plane's listener")
        self._worker.start()
        return self._address

    async def _start(self) -> Address:
        config = self.config
        self._listener = Listener(self._identity(), [self._secret], on_link=self._on_link)
        address = await self._listener.start(config.bind, config.port, config.port_range)
        if config.orphan_guard:
            self._spawn(self._guard())
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
        for task in [*self._tasks, *self._gathering.values()]:
            task.cancel()
        self._rendezvous.close()
        for link in [*self._routers, *self._witnesses.values()]:
            link.close("node stops")
        if self._listener is not None:
            await self._listener.close()

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
            data_addr=str(self._address) if self._address else "",
            incarnation=self._incarnation,
        )

    def _spawn(self, coro: Any) -> None:
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hop(self, function: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        """`function`, called on the loop whichever thread asks."""
        return lambda message: self._io.soon(function, message)

    # -- speaking, on the loop --------------------------------------------------------------------

    def _tell_routers(self, message: dict[str, Any]) -> None:
        for link in list(self._routers):
            link.send(message)

    def _stream(self, message: dict[str, Any]) -> None:
        request = self._requests.get(message["id"])
        if request is None:
            return
        if message["type"] == "end":
            del self._requests[message["id"]]
        request[1].send_stream(message)

    def _on_death(self, error: dict[str, Any]) -> None:
        """The MLX thread ended by itself: whoever waits for it hears so, and the other members lose this one."""
        for request, (_, owner) in list(self._requests.items()):
            del self._requests[request]
            owner.send_stream(failed_end(request, error))
        if self._order is not None:
            self._tell_routers({"type": "error", "id": self._order.id, "error": error})
        for link in list(self._witnesses.values()):
            link.close("its MLX thread has ended")

    def _tell_leader(self, message: dict[str, Any]) -> None:
        if self._order is not None:
            self._tell_member(self._order.members[0].node_id, message)

    def _tell_members(self, message: dict[str, Any]) -> None:
        if self._order is not None:
            for member in self._order.members:
                self._tell_member(member.node_id, message)

    def _tell_member(self, node_id: str, message: dict[str, Any]) -> None:
        if link := self._witnesses.get(node_id):
            link.send(message)

    # -- links, on the loop -----------------------------------------------------------------------

    def _on_link(self, link: Link) -> None:
        hello = link.peer.hello
        kind, instance = hello.get("link", "control"), hello.get("instance", "")
        if kind in ("hot", "witness"):
            self._rendezvous.arrived((str(instance), link.peer.node_id, str(kind)), link)
            return
        control = self._control(link)
        if link.peer.role == "router":
            self._routers.add(control)

    def _control(self, link: Link, *, measure: bool = False) -> ControlLink:
        return ControlLink(
            link, on_message=self._on_message, on_stream=self._on_stream, on_state=self._on_state, measure=measure
        )

    def _on_stream(self, link: ControlLink, message: dict[str, Any]) -> None:
        """Nobody streams to a node of this kind."""

    def _on_state(self, link: ControlLink, state: str, reason: str) -> None:
        if state not in ("dead", "closed"):
            return
        node_id = link.peer.node_id
        if link in self._routers:
            self._routers.discard(link)
            self._router_seen = time.monotonic()
            self._stop_gathering(link)
            for request, owner in list(self._requests.values()):
                if owner is link:
                    self._cancel(request, "its router is gone")
        if self._witnesses.get(node_id) is link:
            del self._witnesses[node_id]
            if self._order is not None:
                self._worker.fail(self._order.instance, PeerLost(reason, node=node_id))

    def _on_message(self, link: ControlLink, message: dict[str, Any]) -> None:
        try:
            self._dispatch(link, message)
        except MlxcelError as error:
            if message.get("type") != "error":  # two nodes that refuse each other's refusals would never end
                self._refuse(link, message, error)

    def _refuse(self, link: ControlLink, message: dict[str, Any], error: MlxcelError) -> None:
        details = error.at(self.config.node_id).to_dict()
        if message.get("type") == "generate":
            link.send_stream(failed_end(message.get("id"), details))
        else:
            link.send({"type": "error", "id": message.get("id"), "error": details})

    def _dispatch(self, link: ControlLink, message: dict[str, Any]) -> None:
        kind = message.get("type")
        from_router = link in self._routers
        order = self._order
        if from_router and kind in ("load", "unload", "generate") and self._worker.ended is not None:
            raise self._worker.ended
        if from_router and kind == "load":
            self._load(link, LoadOrder.from_dict(message))
        elif from_router and kind == "unload":
            self._unload(link, field(message, "id", str), str(message.get("instance", "")))
        elif from_router and kind == "generate":
            self._generate(link, GenerateOrder.from_dict(message))
        elif from_router and kind == "cancel":
            request = self._requests.get(field(message, "id", str))
            if request is not None and request[1] is link:
                self._cancel(request[0], "stopped by the user")
        elif kind == "status":
            link.send({"type": "reply", "id": field(message, "id", str), "status": self.status()})
        elif order and kind == "abort" and link is self._witnesses.get(order.members[0].node_id):
            error = errors.from_dict(field(message, "error", dict))
            self._worker.abort(field(message, "epoch", int), errors.PeerAborted(error.cause, node=error.node))
        elif order and kind == "failed" and link in self._witnesses.values():
            self._worker.abort(field(message, "epoch", int), errors.from_dict(field(message, "error", dict)))
        else:
            raise WireError(f"{link.peer.node_id} ({link.peer.role}) may not send {kind!r} here")

    # -- orders, on the loop ----------------------------------------------------------------------

    def _load(self, link: ControlLink, order: LoadOrder) -> None:
        if self._order is not None:
            raise ClusterError(f"holds {self._order.model} already", advice="Unload it first.")
        me = order.place(self.config.node_id)  # one without a place for this node is refused while it is still free
        self._order = order
        links = gather_links(order, me, self._identity(), self._secret, self._rendezvous)
        gathering = self._gathering[link] = asyncio.get_running_loop().create_task(links)
        gathering.add_done_callback(functools.partial(self._gathered, link, order, me))

    def _gathered(self, link: ControlLink, order: LoadOrder, me: int, gathering: Gathering) -> None:
        """The links of `order` are open: hand the load to the MLX thread. Or they are not, or nobody wants them now."""
        wanted = self._gathering.get(link) is gathering
        if wanted:
            del self._gathering[link]
        pairs = {} if gathering.cancelled() or gathering.exception() else gathering.result()
        if gathering.cancelled() or not wanted:
            for pair in pairs.values():
                pair.close()
            self._give_up(link, order, Cancelled("stopped before its links to the other members were open"))
        elif error := gathering.exception():
            self._give_up(link, order, error)
        else:
            # Polling pays only while every rank has a core; engines of one cluster may share this host.
            spin_s = MAX_SPIN_S if usable_cores() >= order.layout.size else 0.0
            hot = {other: HotLink(pair.hot, spin_s=spin_s) for other, pair in pairs.items()}
            for other, pair in pairs.items():
                self._witnesses[order.members[other].node_id] = self._control(pair.witness, measure=True)
            self._loading = Load(order, me, hot, lambda: self._io.soon(self._forget, order))
            self._worker.post(self._loading)

    def _stop_gathering(self, link: ControlLink) -> None:
        """What `link` ordered to be loaded is not wanted any more."""
        if gathering := self._gathering.pop(link, None):
            gathering.cancel()

    def _give_up(self, link: ControlLink, order: LoadOrder, error: BaseException) -> None:
        """The load of `order` ends before it began."""
        self._forget(order)
        link.send({"type": "error", "id": order.id, "error": errors.wrap(error, self.config.node_id).to_dict()})

    def _forget(self, order: LoadOrder) -> None:
        """Close the witnesses of `order`, if it is still the one: this node is free again."""
        if self._order is not order:
            return
        self._order = self._loading = None
        for member in order.members:
            if link := self._witnesses.pop(member.node_id, None):
                link.close("model unloaded")

    def _unload(self, link: ControlLink, request_id: str, instance: str) -> None:
        """Stop what runs, drop the model, then answer. Another instance than the one held is not there any more."""
        order = self._order
        if instance and (order is None or order.instance != instance):
            link.send({"type": "reply", "id": request_id})
            return
        for loader in list(self._gathering):
            self._stop_gathering(loader)
        for request, _ in list(self._requests.values()):
            self._cancel(request, "the model is being unloaded")
        if self._loading is not None:
            self._loading.cancelled = True
        self._worker.abort_load(Cancelled("the model is being unloaded"))

        def done() -> None:
            if order is not None:
                self._forget(order)
            link.send({"type": "reply", "id": request_id})

        self._worker.post(Unload(lambda: self._io.soon(done)))

    def _generate(self, link: ControlLink, order: GenerateOrder) -> None:
        if self._order is None or self._order.instance != order.instance:
            raise ClusterError("no such model is loaded", advice="Load one first.")
        if self._order.place(self.config.node_id) != 0:
            raise WireError("a request goes to the leader, which this node is not")
        waiting = sum(request.order.weight for request, _ in self._requests.values())
        if len(self._requests) >= MAX_WAITING or (waiting and waiting + order.weight > MAX_WAITING_WEIGHT):
            raise Busy(f"{len(self._requests)} requests are waiting already", advice="Try again in a moment.")
        if order.id in self._requests:
            raise WireError("a request with this id is under way")
        command = Generate(order)
        self._requests[order.id] = (command, link)
        self._worker.post(command)

    def _cancel(self, request: Generate, why: str) -> None:
        """Stop a request: the one under way leaves its step, one that waits ends when its turn comes at once."""
        request.cancelled = True
        if request.epoch:
            self._worker.abort(request.epoch, Cancelled(why))

    # -- status -----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What this node is doing, as plain data."""
        import psutil

        config, worker, order = self.config, self._worker, self._order
        instance = worker.instance
        report: dict[str, Any] = {
            "node_id": config.node_id,
            "role": config.role,
            "address": str(self._address),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "platform": f"{platform.system()} {platform.machine()}",
            "threads": config.threads,
            "blas": config.blas,
            "activity": f"stalled: {worker.ended}" if worker.ended else worker.activity,
            "progress": worker.progress,
            "requests": len(self._requests),
            "memory_bytes": psutil.Process().memory_info().rss,
            "links": {node: link.info() for node, link in self._witnesses.items()},
            "error": str(worker.broken) if worker.broken else None,
            "model": None,
        }
        if order is not None and instance is not None:
            me, layout = instance.me, order.layout
            report["model"] = {
                "path": order.model,
                "layout": layout.name,
                "stage": layout.stage_of(me),
                "rank": layout.rank_of(me),
                "layers": list(layout.stages[layout.stage_of(me)]),
                "dtype": instance.part.dtype,
                "planned_bytes": instance.part.planned_bytes,
                "resident_bytes": instance.part.resident_bytes,
            }
        return report
