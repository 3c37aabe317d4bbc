"""Bringing a member's part of a model into memory, on the MLX thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxcel_nb.cluster.transports import RDMA_BIT
from mlxcel_nb.models.loading import LoadProgress, load_part
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.further.offer import Offer
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.interrupt import Interrupt
from mlxcel_nb.net.links.link import SHARED_MEMORY
from mlxcel_nb.net.shared_memory.offer import ELSEWHERE, SharedMemoryOffer
from mlxcel_nb.net.ucx.offer import UcxOffer
from mlxcel_nb.plan.capacity import Room, counted
from mlxcel_nb.plan.part import part_of
from mlxcel_nb.runtime import collectives
from mlxcel_nb.runtime.fabric import Fabric
from mlxcel_nb.runtime.instance import Instance
from mlxcel_nb.runtime.protocol import LoadOrder

if TYPE_CHECKING:
    from mlxcel_nb.runtime.worker import Worker

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 0.1


def speed_up(links: Mapping[int, HotLink], interrupt: Interrupt) -> None:
    """Move to shared memory or RDMA what can be moved, in the order of the members, the same at both ends of each."""
    for _, hot in sorted(links.items()):
        ways: dict[str, Callable[[], Offer]] = {}
        if SHARED_MEMORY in hot.peer.hello["features"]:
            ways["shared memory"] = partial(SharedMemoryOffer, hot.link)
        if hot.link.transports & RDMA_BIT:
            ways["RDMA"] = UcxOffer
        for name, offering in ways.items():
            reason = agree(hot, offering, interrupt=interrupt)
            if not reason:
                break
            if not reason.endswith(ELSEWHERE):  # as most hosts are
                hot.link.why = "; ".join(filter(None, [hot.link.why, f"no {name}: {reason}"]))


def room_left(order: LoadOrder, part: LoadedPart) -> dict[str, Any] | None:
    """What this host has left for keys and values of the part, and how they grow. Never a reason for a load to fail."""
    from mlxcel_nb.models import memory, sizes
    from mlxcel_nb.runtime.active import PREFILL_CHUNK

    try:
        growths = sizes.part_caches(
            Path(order.model), part.part, dtype=part.dtype, chunk=PREFILL_CHUNK, allow_code=order.allow_code
        )
    except Exception as error:  # noqa: BLE001  # a model may do anything when it is built; it has been loaded all the same
        log.info("the caches of %s cannot be told: %s", order.model, error)
        return None
    return Room(counted(growths), memory.room().available).to_dict()


def load(worker: Worker, order: LoadOrder, me: int, links: dict[int, HotLink]) -> Instance:
    """The instance of member `me`; progress goes to the router ten times a second at most."""
    layout = order.layout
    speed_up(links, worker.interrupt)
    fabric = Fabric(layout, me, links, worker.interrupt, order.step_s, worker.spans)
    sums = collectives.choose(order, me, fabric, worker.inside)
    last_told = 0.0

    def progress(done: LoadProgress) -> None:
        nonlocal last_told
        worker.activity = f"loading {done.what}"
        worker.moved()
        now = time.monotonic()
        if now - last_told >= PROGRESS_EVERY_S or done.done_bytes >= done.total_bytes:
            last_told = now
            worker.outbox.to_router({
                "type": "progress", "id": order.id, "node": worker.node_id, "what": done.what,
                "done_bytes": done.done_bytes, "total_bytes": done.total_bytes,
            })  # fmt: skip

    part = load_part(
        Path(order.model),
        part_of(layout, layout.stage_of(me), layout.rank_of(me), vocab_parallel=order.vocab_parallel),
        dtype=order.dtype,
        all_reduce=sums.all_reduce if layout.tp > 1 else None,
        progress=progress,
        check=worker.check,
        allow_code=order.allow_code,
        exchange=fabric.all_to_all if layout.ep > 1 else None,
        names=[member.node_id for member in order.members] if layout.ep > 1 else (),
        gather=sums.gather,
    )
    return Instance(order, me, part, fabric, sums)
