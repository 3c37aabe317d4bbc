"""The model instance a node holds: from the order to load it until it is forgotten. On the node's loop.

It opens the links to the other members, hands the load to the MLX thread, and keeps the witnesses: the links that
tell whether a member lives and carry what must reach it while its MLX thread is deep in a computation. Orders come
from a router, which the node has checked; members are known by the links that were made for this instance.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from mlxcel_nb import errors
from mlxcel_nb.errors import Cancelled, ClusterError, WireError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.hot.hot_link import MAX_SPIN_S, HotLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.runtime.commands import Load, Unload
from mlxcel_nb.runtime.gathering import Pair
from mlxcel_nb.runtime.protocol import LoadOrder, Member, field
from mlxcel_nb.runtime.rendezvous import Rendezvous
from mlxcel_nb.runtime.witnesses import Dial, Witnesses
from mlxcel_nb.runtime.worker import Worker
from mlxcel_nb.util.cores import usable_cores

Gathering = asyncio.Task[dict[int, Pair]]


class Holding:
    """At most one instance at a time.

    Args:
        soon: calls a function on the loop, from any thread.
        gather: opens the links that member `me` of an order needs.
        dial, drive: for the witnesses.
    """

    def __init__(
        self,
        node_id: str,
        worker: Worker,
        *,
        soon: Callable[..., None],
        gather: Callable[[LoadOrder, int], Coroutine[Any, Any, dict[int, Pair]]],
        rendezvous: Rendezvous,
        dial: Dial,
        drive: Callable[[Link], ControlLink],
    ) -> None:
        self.order: LoadOrder | None = None
        self.witnesses = Witnesses(rendezvous, dial=dial, drive=drive, lost=worker.fail)
        self._node_id = node_id
        self._worker = worker
        self._soon = soon
        self._gather = gather
        self._loading: Load | None = None
        self._gathering: dict[ControlLink, Gathering] = {}

    # -- loading and unloading --------------------------------------------------------------------

    def load(self, order: LoadOrder, router: ControlLink) -> None:
        """Begin to load; the router hears of the rest.

        Raises:
            ClusterError: another instance is held. WireError: the order has no place for this node.
        """
        if self.order is not None:
            raise ClusterError(
                f"holds {self.order.model} already", advice="Unload it first: %mlxcel unload, in Python unload()."
            )
        me = order.place(self._node_id)  # one without a place for this node is refused while it is still free
        self.order = order
        links = self._gather(order, me)
        gathering = self._gathering[router] = asyncio.get_running_loop().create_task(links)
        gathering.add_done_callback(functools.partial(self._gathered, router, order, me))

    def unload(self, router: ControlLink, request_id: str, instance: str, cancel: Callable[[], None]) -> None:
        """Stop what runs (`cancel` does it for requests), drop the model, then answer.

        Another instance than the one held is not there any more.
        """
        order = self.order
        if not self.holds(instance):
            router.send({"type": "reply", "id": request_id})
            return
        for loader in list(self._gathering):
            self.router_left(loader)
        cancel()
        if self._loading is not None:
            self._loading.cancelled = True
        self._worker.abort_load(Cancelled("the model is being unloaded"))

        def done() -> None:
            if order is not None:
                self._forget(order)
            router.send({"type": "reply", "id": request_id})

        self._worker.post(Unload(lambda: self._soon(done)))

    def router_left(self, router: ControlLink) -> None:
        """What `router` ordered to be loaded is not wanted any more."""
        if gathering := self._gathering.pop(router, None):
            gathering.cancel()

    def close(self) -> None:
        """The node stops."""
        for gathering in self._gathering.values():
            gathering.cancel()
        self.witnesses.close("node stops")

    def _gathered(self, router: ControlLink, order: LoadOrder, me: int, gathering: Gathering) -> None:
        """The links of `order` are open: hand the load to the MLX thread. Or they are not, or nobody wants them now."""
        wanted = self._gathering.get(router) is gathering
        if wanted:
            del self._gathering[router]
        pairs = {} if gathering.cancelled() or gathering.exception() else gathering.result()
        if gathering.cancelled() or not wanted:
            for pair in pairs.values():
                pair.close()
            self._give_up(router, order, Cancelled("stopped before its links to the other members were open"))
        elif error := gathering.exception():
            self._give_up(router, order, error)
        else:
            # Polling pays only while every rank has a core; engines of one cluster may share this host.
            spin_s = MAX_SPIN_S if usable_cores() >= order.layout.size else 0.0
            hot = {other: HotLink(pair.hot, spin_s=spin_s) for other, pair in pairs.items()}
            witnesses = {order.members[other].node_id: pair.witness for other, pair in pairs.items()}
            self.witnesses.open(order.instance, witnesses)
            self._loading = Load(order, me, hot, lambda: self._soon(self._forget, order))
            self._worker.post(self._loading)

    def _give_up(self, router: ControlLink, order: LoadOrder, error: BaseException) -> None:
        """The load of `order` ends before it began."""
        self._forget(order)
        router.send({"type": "error", "id": order.id, "error": errors.wrap(error, self._node_id).to_dict()})

    def _forget(self, order: LoadOrder) -> None:
        """Close the witnesses of `order`, if it is still the one: this node is free again."""
        if self.order is order:
            self.order = self._loading = None
            self.witnesses.close("model unloaded")

    # -- the other members ------------------------------------------------------------------------

    def tell_leader(self, message: dict[str, Any]) -> None:
        if self.order is not None:
            self.witnesses.tell(self.order.members[0].node_id, message)

    def tell_members(self, message: dict[str, Any]) -> None:
        if self.order is not None:
            for member in self.order.members:
                self.witnesses.tell(member.node_id, message)

    def check_leads(self, instance: str) -> None:
        """Refuse what only the leader of `instance` obeys, where this node is not.

        Raises:
            ClusterError: it is not held here. WireError: another member leads it.
        """
        if self.order is None or self.order.instance != instance:
            raise ClusterError("no such model is loaded", advice="Load one first.")
        if self.order.place(self._node_id) != 0:
            raise WireError("a request goes to the leader, which this node is not")

    def holds(self, instance: str) -> bool:
        """Whether this instance is held here, or any, where none is named."""
        return not instance or (self.order is not None and self.order.instance == instance)

    def member(self, instance: str) -> tuple[Member, bool]:
        """This node among the members of `instance`, and whether it leads them.

        Raises:
            ClusterError: it is not held here.
        """
        if self.order is None or self.order.instance != instance:
            raise ClusterError("no such model is loaded", advice="Load one first.")
        me = self.order.place(self._node_id)
        return self.order.members[me], me == 0

    def on_message(self, link: ControlLink, message: dict[str, Any]) -> bool:
        """Leave an epoch because the leader says so, or because of a member's error; False for all else."""
        kind = message.get("type")
        if kind == "abort" and self.is_leader(link):
            error = errors.from_dict(field(message, "error", dict))
            self._worker.abort(field(message, "epoch", int), errors.PeerAborted(error.cause, node=error.node))
        elif kind == "failed" and self.is_member(link):
            self._worker.abort(field(message, "epoch", int), errors.from_dict(field(message, "error", dict)))
        else:
            return False
        return True

    def is_leader(self, link: ControlLink) -> bool:
        """Whether `link` is the witness of the instance's leader."""
        return self.order is not None and link is self.witnesses.links.get(self.order.members[0].node_id)

    def is_member(self, link: ControlLink) -> bool:
        """Whether `link` is a witness of the instance."""
        return self.order is not None and link in self.witnesses.links.values()

    def died(self) -> None:
        """The MLX thread of this node has ended or is stuck: the other members lose this one."""
        self.witnesses.close("its MLX thread works no more")
