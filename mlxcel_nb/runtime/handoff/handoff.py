"""A member's side of working together with other instances: what it keeps, and the links to those that read for its
instance and to those for which it reads.

Made on the MLX thread, which owns the two halves, `arrivals` and `departures`; every link has a thread of its own.
When a link is there, the member that reads says what it keeps of each cache, and the other what it wants of it; when
all have, the instances can work together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxcel_nb import errors
from mlxcel_nb.errors import MlxcelError, WireError
from mlxcel_nb.models.cache_shares import holdings
from mlxcel_nb.models.cache_state import describe
from mlxcel_nb.models.caches import every
from mlxcel_nb.net.bulk.bulk_link import BulkLink
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.plan import recutting
from mlxcel_nb.plan.recutting import Holdings
from mlxcel_nb.runtime.handoff.account import Account
from mlxcel_nb.runtime.handoff.arrivals import Arrivals
from mlxcel_nb.runtime.handoff.departures import Departures, Target
from mlxcel_nb.runtime.handoff.orders import JoinOrder
from mlxcel_nb.runtime.protocol import field
from mlxcel_nb.scheduling.step_plan import Hand
from mlxcel_nb.util.log import get_logger

if TYPE_CHECKING:
    from mlxcel_nb.runtime.commands import Join
    from mlxcel_nb.runtime.instance import Instance

log = get_logger("runtime.handoff")

MOST_BYTES = 1 << 46
"""Of caches, where a member cannot say how its own grow."""


class Handoff:
    """Of one loaded instance. `take` and `close` are for any thread, the rest for the MLX thread.

    Args:
        landed: told the epoch and number of a transfer that is complete here.
        over: told of a transfer that all receivers have taken from here, or have not.
        broken: told the instance and node of a link that this side had dialled and that has ended.

    Raises:
        ModelError: caches that cannot travel.
    """

    def __init__(
        self,
        instance: Instance,
        join: Join,
        *,
        landed: Callable[[int, int], None],
        over: Callable[[Hand, Account | MlxcelError], None],
        broken: Callable[[str, str], None],
    ) -> None:
        part, order = instance.part, join.order
        leaves = list(every(part.make_cache()))
        for cache in leaves:
            describe(cache)  # or say that it cannot travel
        self.order: JoinOrder = order
        self._own = holdings(part)
        model = bytes.fromhex(order.model)
        room = instance.room
        self.arrivals = Arrivals(
            self._own, model, limit=room.available if room is not None else MOST_BYTES, landed=landed
        )
        self.departures = Departures(
            self._own, model, heads=_heads(self._own), states={n for n, x in enumerate(leaves) if hasattr(x, "cache")},
            room=room.at if room is not None else lambda _: MOST_BYTES, encoding=order.encoding, over=over,
        )  # fmt: skip
        self._turn = instance.me
        self._stall_s = instance.order.step_s
        self._broken = broken
        self._ready, self._failed = join.ready, join.failed
        self._lock = threading.Lock()
        self._links: dict[tuple[str, str], BulkLink] = {}
        self._targets: dict[str, dict[str, Target]] = {peer.instance: {} for peer in order.serves}
        self._held: dict[str, dict[str, Holdings]] = {peer.instance: {} for peer in order.readers}
        self._met: set[str] = set()
        self._closed = False
        for (to, node_id), link in join.outgoing.items():
            self.take(to, node_id, link)
        for (reader, node_id), link in join.incoming.items():
            self.take(reader, node_id, link)
        self._look()

    def take(self, instance: str, node_id: str, link: Link) -> None:
        """Drive a link to a member of another instance, in place of one that has ended."""
        outgoing = instance in self._targets
        made = BulkLink(
            link,
            on_frame=self._answered if outgoing else partial(self._came, instance),
            on_message=partial(self._heard, instance),
            on_end=partial(self._ended, instance),
            stall_s=self._stall_s,
        )
        with self._lock:
            if self._closed:
                link.close()
                return
            self._links[instance, node_id] = made
        if outgoing:
            made.post({"type": "holds", "shares": recutting.tell(self._own)})
        made.start()

    def knows(self, instance: str, node_id: str) -> bool:
        """Whether a node reads for this member's instance."""
        return node_id in self._held.get(instance, ())

    def leave(self, epoch: int) -> None:
        """All sequences of this member's are gone."""
        self.arrivals.leave(epoch)
        self.departures.abandon()

    def close(self) -> None:
        """Nothing is sent or taken any more."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        self.arrivals.close()
        for link in links:
            link.stop("the model is unloaded")

    # -- the links', each on its thread

    def _came(self, instance: str, link: BulkLink, payload: memoryview) -> bytes | None:
        if instance not in self._met:
            raise WireError("keys and values before anybody said what is wanted")
        return self.arrivals.frame(self.arrivals.sender(instance, link.node), payload)

    def _answered(self, link: BulkLink, payload: memoryview) -> None:
        self.departures.frame(link.node, payload)

    def _heard(self, instance: str, link: BulkLink, message: dict[str, Any]) -> None:
        kind = message.get("type")
        if kind == "wants" and instance in self._targets:
            wanted = recutting.read_wants(field(message, "wants", list))
            self._targets[instance][link.node] = Target(link.node, link, wanted)
        elif kind == "holds" and instance in self._held:
            self._held[instance][link.node] = recutting.read(field(message, "shares", list))
        else:
            raise WireError(f"{kind!r:.20} on a link for caches")
        if instance in self._held and instance in self._met:
            wanted = self.arrivals.renew(instance, link.node)
            link.post({"type": "wants", "wants": recutting.tell_wants(wanted)})
            return
        try:
            self._look()
        except WireError as error:
            self._failed(error.at(link.node))

    def _ended(self, instance: str, link: BulkLink, error: MlxcelError) -> None:
        with self._lock:
            if self._links.get((instance, link.node)) is not link:
                return
            del self._links[instance, link.node]
            closed = self._closed
        if closed:
            return
        log.info("the link for caches to %s has ended: %s", link.node, error)
        if instance in self._targets:
            self.departures.lost(link.node, error)
            self._broken(instance, link.node)
        if not self._everybody():
            self._failed(errors.wrap(error, link.node))

    # -- who is there

    def _look(self) -> None:
        """See who has said what there is to say."""
        with self._lock:
            for peer in self.order.readers:
                held = self._held[peer.instance]
                if len(held) == len(peer.members) and peer.instance not in self._met:
                    for node_id, wanted in self.arrivals.meet(peer.instance, held, self._turn).items():
                        self._links[peer.instance, node_id].post(
                            {"type": "wants", "wants": recutting.tell_wants(wanted)}
                        )
                    self._met.add(peer.instance)
            for peer in self.order.serves:
                targets = self._targets[peer.instance]
                if len(targets) == len(peer.members):
                    self.departures.meet(peer.instance, list(targets.values()))
                    self._met.add(peer.instance)
            ready = self._everybody()
        if ready:
            self._ready()

    def _everybody(self) -> bool:
        return len(self._met) == len(self.order.readers) + len(self.order.serves)


def _heads(own: Holdings) -> int:
    """Kv-heads of the whole model, as far as it is cut; else 1, which stands for all there are."""
    totals = [share[0].total for share in own if share is not None and len(share) == 1 and share[0].total]
    return max(totals, default=1)
