"""What a node's host is connected to, for its hellos, its status, and whoever plans links. On the node's loop.

A node that listens on loopback needs to know nothing, and asks nothing: engines of one laptop start as quickly as
before. Any other asks the probe on a thread, when it starts and again whenever somebody wants to know: cables are
plugged and leases change while a node runs. Whoever asks meanwhile shares the answer.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Any

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.places import Place, numeric, published
from mlxcel_nb.cluster.transports import RDMA_BIT, TCP_BIT, HostFacts, advise
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.interfaces import probe as interfaces
from mlxcel_nb.net.ucx import library as ucx

ANSWER_S = 2 * interfaces.WAIT_S
"""For the probe; after it a node goes by what it knew before."""


class Surroundings:
    """Facts about the host.

    Args:
        transport: what the configuration wants of links.
        probe: asks the system; blocks, and is called on threads.
    """

    def __init__(
        self, node_id: str, *, transport: str = "auto", probe: Callable[[], HostFacts] = interfaces.probe
    ) -> None:
        self._node_id = node_id
        self._transport = transport
        self._probe = probe
        self._listens, self._port = "", 0
        self._asking: asyncio.Task[None] | None = None
        self._answers: set[asyncio.Task[None]] = set()
        self.facts: HostFacts | None = None

    def listen(self, bound: str, port: int) -> None:
        """The node's listener is up, at the IP address `bound`."""
        self._listens, self._port = bound, port
        if not self._alone:
            self._refresh()

    @property
    def _alone(self) -> bool:
        ip = numeric(self._listens)
        return ip is None or ip.is_loopback

    async def place(self) -> Place:
        """Where this node can be reached, now."""
        if not self._alone:
            await asyncio.wait({self._refresh()}, timeout=ANSWER_S)
        return self._place()

    def _place(self) -> Place:
        return Place(
            node_id=self._node_id,
            host=interfaces.host_id(),
            listens=self._listens,
            port=self._port,
            interfaces=self.facts.interfaces if self.facts else (),
            transport=self._transport,
        )

    def published(self, address: Address) -> Address:
        """`address`, or an address of this host in place of a wildcard, which nobody could dial."""
        return published(self._place()) if address.is_wildcard and self.facts is not None else address

    def addresses(self) -> list[str]:
        """The IP addresses this host may come from, as far as they are known by now; none for a node on loopback."""
        found = self.facts.interfaces if self.facts else ()
        ips = [ipaddress.ip_interface(text).ip for each in found if each.up for text in each.addresses]
        return [str(ip) for ip in ips if not ip.is_loopback and not ip.is_link_local]

    def answer(self, link: ControlLink, request_id: str) -> None:
        """Reply with the place, as soon as it is known."""
        task = asyncio.get_running_loop().create_task(self._reply(link, request_id))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _reply(self, link: ControlLink, request_id: str) -> None:
        link.send({"type": "reply", "id": request_id, "place": (await self.place()).to_dict()})

    @property
    def transports(self) -> int:
        """The `transports` byte of a hello: Thunderbolt and RDMA where they are there and may be used."""
        if self.facts is None or self._transport == "tcp":
            return TCP_BIT
        return self.facts.bits | (0 if self.no_rdma else RDMA_BIT)

    @property
    def no_rdma(self) -> str:
        """Why this node offers no RDMA; empty where it does."""
        if self.facts is None:
            return "this node listens on loopback alone"
        if self._transport not in ("auto", "rdma"):
            return f"this node's transport is set to {self._transport}"
        if self.facts.system != "Linux" or not self.facts.rdma_devices:
            return "this host has no InfiniBand or RoCE adapter that is up"
        return ucx.missing()

    def report(self) -> dict[str, Any]:
        """For status: what links can be here at best, why, and what would make them better."""
        if self.facts is None:
            return {}
        found = advise(self.facts)
        advice = [*found.advice, *(f"not asked: {what}" for what in self.facts.missing)]
        if self._transport == "rdma" and self.no_rdma:
            advice.append(f"RDMA was asked for and is not used: {self.no_rdma}.")
        return {"transport": found.transport, "reason": found.reason, "advice": advice}

    def close(self) -> None:
        """Nobody waits for an answer any more."""
        for task in (*self._answers, *([self._asking] if self._asking else [])):
            task.cancel()

    def _refresh(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        return self._asking

    async def _ask(self) -> None:
        self.facts = await asyncio.to_thread(self._probe)
