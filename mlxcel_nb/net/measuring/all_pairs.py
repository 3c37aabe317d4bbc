"""`net test`: each node measures its way to each other node, one after the other, because we ask it to.

On an asyncio loop, as a visitor that dials every node. One measurement runs at a time, so that none is in another's
way. A node that cannot be asked, and a pair that cannot be measured, is a reason in its place; the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.names import new_incarnation, visitor_id
from mlxcel_nb.cluster.places import Place
from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.cluster.shape import Shapes
from mlxcel_nb.errors import MlxcelError, PeerLost, StepTimeout
from mlxcel_nb.net.control.control_link import LOOK, SILENT, ControlLink
from mlxcel_nb.net.control.questions import Message, Questions, unless_error
from mlxcel_nb.net.interfaces.probe import host_id, probe
from mlxcel_nb.net.links.dial import Dialler
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.measuring import pair as measuring
from mlxcel_nb.net.measuring.mesh import HERE, Mesh, Pair
from mlxcel_nb.net.measuring.ping import VISITOR_ROLE
from mlxcel_nb.wire.hello import SUITES, Identity, suite_number

PLACE_S = 15.0
"""For a node to say what interfaces it has: on macOS it takes seconds."""

SLACK_S = 15.0
"""Above what a measurement may take, for connecting and for the answer to come."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured of each pair."""

    pings: int = measuring.PINGS
    seconds: float = measuring.SECONDS

    @property
    def limit_s(self) -> float:
        """What one pair may take at most."""
        return measuring.longest_s(self.pings, self.seconds) + SLACK_S


async def measure_mesh(
    nodes: Mapping[str, Sequence[Address]],
    cluster: str,
    secrets: Secrets,
    *,
    suite: str = SUITES[1],
    effort: Effort | None = None,
    shapes: Shapes | None = None,
    on_progress: Callable[[int, int, str], object] | None = None,
) -> Mesh:
    """Measure every pair of `nodes` in both directions, and the way from here to each.

    Args:
        nodes: ids with the addresses they listen at, the best first.
        suite: the cipher suite of the nodes.
        shapes: what the links from here are made to be like; the nodes shape those between them.
        on_progress: told how many pairs are done, of how many, and which is next.
    """
    identity = Identity(
        cluster=cluster,
        node_id=visitor_id(),
        role=VISITOR_ROLE,
        incarnation=new_incarnation(),
        suite=suite_number(suite),
    )
    dialler = Dialler(identity=lambda: identity, secrets=secrets, shapes=shapes)
    tester = _Tester(nodes, dialler, effort or Effort())
    try:
        return await tester.run(on_progress or (lambda *_: None))
    finally:
        tester.close()


class _Tester:
    def __init__(self, nodes: Mapping[str, Sequence[Address]], dialler: Dialler, effort: Effort) -> None:
        self._nodes = nodes
        self._dialler = dialler
        self._effort = effort
        self._links: dict[str, ControlLink] = {}
        self._absent: dict[str, MlxcelError] = {}
        self._questions = Questions()

    async def run(self, on_progress: Callable[[int, int, str], object]) -> Mesh:
        await asyncio.gather(*(self._meet(node) for node in self._nodes))
        places = await self._places()
        ways = [(HERE, node) for node in self._nodes]
        ways += [(a, b) for a in self._nodes for b in self._nodes if a != b]
        pairs = []
        for done, (source, target) in enumerate(ways):
            on_progress(done, len(ways), f"{source} to {target}")
            pairs.append(await self._pair(source, target))
        on_progress(len(ways), len(ways), "")
        return Mesh(nodes=(HERE, *self._nodes), pairs=tuple(pairs), places=places)

    def close(self) -> None:
        for link in self._links.values():
            link.close("measured")

    # -- the nodes --------------------------------------------------------------------------------

    async def _dial(self, node: str, **hello: str) -> Link:
        return await self._dialler.dial_node(node, self._nodes[node], hello)

    async def _meet(self, node: str) -> None:
        try:
            link = await self._dial(node)
        except MlxcelError as error:
            self._absent[node] = error
        else:
            self._links[node] = ControlLink(link, on_message=self._heard, on_state=self._state)

    async def _places(self) -> dict[str, Place]:
        """What the nodes say of their interfaces, and ours; a node that says nothing is judged without."""
        found: dict[str, Place] = {}

        async def ask(node: str) -> None:
            try:
                told = await self._ask(node, {"type": "place"}, PLACE_S)
                found[node] = Place.from_dict(node, told.get("place") or {})
            except MlxcelError:
                return

        probing = measuring.on_thread(probe, "probe")
        await asyncio.gather(*map(ask, self._links))
        facts = await probing
        found[HERE] = Place(node_id=HERE, host=host_id(), listens="127.0.0.1", port=0, interfaces=facts.interfaces)
        return found

    # -- the pairs --------------------------------------------------------------------------------

    async def _pair(self, source: str, target: str) -> Pair:
        why = self._absent.get(target if source == HERE else source)
        if why is not None:
            who = "" if source == HERE else f"{source} cannot be asked: "
            return Pair(source=source, target=target, error=f"{who}{why.cause}", advice=why.advice or "")
        try:
            measured, ours, theirs = await (self._from_here(target) if source == HERE else self._asked(source, target))
        except MlxcelError as error:
            return Pair(source=source, target=target, error=error.cause, advice=error.advice or "")
        return Pair(source=source, target=target, measured=measured, ours=ours, theirs=theirs)

    async def _from_here(self, target: str) -> tuple[measuring.Measured, str, str]:
        link = await self._dial(target, link=measuring.LINK)
        peer = link.peer.address[0]
        found = await measuring.measured(link, self._effort.pings, self._effort.seconds)
        return found, measuring.source_of(peer), peer

    async def _asked(self, source: str, target: str) -> tuple[measuring.Measured, str, str]:
        order = {
            "type": "measure",
            "node": target,
            "addresses": [str(address) for address in self._nodes[target]],
            "pings": self._effort.pings,
            "seconds": self._effort.seconds,
        }
        told = await self._ask(source, order, self._effort.limit_s)
        used = told.get("used")
        ours, theirs = map(str, used) if isinstance(used, list) and len(used) == 2 else ("", "")
        return measuring.Measured.from_dict(told.get("measured")), ours, theirs

    # -- questions --------------------------------------------------------------------------------

    async def _ask(self, node: str, message: Message, within_s: float) -> Message:
        if node in self._absent:
            gone = self._absent[node]
            raise PeerLost(gone.cause, node=node, advice=gone.advice)
        try:
            with self._questions.ask(self._links[node], message) as answer:
                async with asyncio.timeout(within_s):
                    return unless_error(await answer)
        except TimeoutError:
            what = message["type"]
            raise StepTimeout(f"no answer to {what!r} within {within_s:.0f} s", node=node, advice=SILENT) from None

    def _heard(self, link: ControlLink, message: Message) -> None:
        self._questions.take(link, message)

    def _state(self, link: ControlLink, state: str, reason: str) -> None:
        if state not in ("dead", "closed"):
            return
        node = link.peer.node_id
        why = f"the connection to it ended: {reason}"
        self._absent[node] = lost = PeerLost(why, node=node, advice=link.mend or LOOK)
        self._questions.fail(lost, node)
