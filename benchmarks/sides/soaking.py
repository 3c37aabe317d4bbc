"""`python -m benchmarks.sides.soaking`: one member of a soak, driven by `benchmarks.soak`.

Standard input has one JSON object a line: first who this is (`name`, `secret`, `rekey_every`, `links`), then orders.
With every other member it has a control link, on which numbered messages, streams and pings go both ways all the time,
and a hot link, on which a thread exchanges tensors in rounds; where it is told so, a second one in shared memory, moved
there as the loading of a model does. What is in each follows from its number, so the receiver knows what is due:
anything lost, repeated, swapped or changed is an error that is told at the next `facts`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.sides.guarded import CLUSTER, own_facts, raise_limit, say
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.cluster.shape import parse_links
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.control.control_link import ControlLink
from mlxcel_nb.net.further.agree import agree
from mlxcel_nb.net.hot.hot_link import HotLink
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.net.links.listener import Listener
from mlxcel_nb.net.shared_memory.offer import SharedMemoryOffer
from mlxcel_nb.wire.frames import Sealer
from mlxcel_nb.wire.handshake import Identity

PAUSE_S = 0.02
"""Between two bursts on a control link: what is sought is days, not load."""

ROUND_S = 0.01
SLOW_ROUNDS, SLOW_S = 25, 0.4
"""In one round of so many a receiver takes its time while the sender goes on."""

RENEW_S = 3.0
"""A guest's control links are replaced after this."""

MAX_ERRORS = 20


def content(kind: str, number: int) -> bytes:
    """What the message, stream item or tensor of that number holds: mostly small, now and then large."""
    chance = random.Random(f"{kind} {number}")
    size = chance.choice((10, 1000, 1000, 10_000, 10_000, 60_000, 300_000 if number % 10 == 0 else 3000))
    return hashlib.shake_128(f"{kind} {number}".encode()).digest(chance.randint(1, size))


class Counts:
    """What went through all links of this process; added to by the loop and the hot threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.totals = dict.fromkeys(
            ("messages", "streams", "pings", "tensors", "in_memory", "bytes", "frames", "rekeys", "links"), 0
        )
        self.errors: list[str] = []
        self.ends: list[str] = []

    def add(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self.totals[name] += count

    def error(self, text: str) -> None:
        with self._lock:
            if len(self.errors) < MAX_ERRORS:
                self.errors.append(text)

    def watch(self) -> None:
        """Count the frames and the new keys of all that this process sends."""
        sealer: Any = Sealer
        rekey = sealer._rekey

        def counted(this: Any) -> int:
            self.add(rekeys=1, frames=this._frames + 1)
            return int(rekey(this))

        sealer._rekey = counted


class Talk:
    """One control link: both directions numbered, each from 0."""

    def __init__(self, member: Member, link: Link) -> None:
        self._member = member
        self.peer = link.peer.node_id
        self.sent = {"message": 0, "stream": 0}
        self.got = {"message": 0, "stream": 0}
        self.control = ControlLink(
            link,
            on_message=lambda _, message: self._take("message", message),
            on_stream=lambda _, message: self._take("stream", message),
            on_state=self._state,
        )
        self.task = asyncio.get_running_loop().create_task(self._speak())

    async def _speak(self) -> None:
        chance = random.Random()
        with contextlib.suppress(MlxcelError):  # the link's end is told by its state
            while self.control.open and not self._member.hushed:
                for _ in range(chance.randint(1, 6)):
                    self.control.send(self._next("message"))
                    self.control.send_stream(self._next("stream"))
                await self.control.drain()
                await self.control.ping(content("ping", chance.randint(0, 100)), within_s=30.0)
                self._member.counts.add(pings=1)
                await asyncio.sleep(PAUSE_S * 2 * chance.random())

    def _next(self, kind: str) -> dict[str, Any]:
        number = self.sent[kind]
        self.sent[kind] += 1
        return {"type": "soak", "n": number, "data": content(kind, number)}

    def _take(self, kind: str, message: dict[str, Any]) -> None:
        if message.get("type") == "last":
            if message["sent"] != self.got:
                self._member.counts.error(f"{self.peer} sent {message['sent']}, {self.got} came")
            return
        number, data = message["n"], message["data"]
        if number != self.got[kind]:
            self._member.counts.error(f"{kind} {number} of {self.peer} where {self.got[kind]} was due")
        elif data != content(kind, number):
            self._member.counts.error(f"{kind} {number} of {self.peer} is not what was sent")
        self.got[kind] = number + 1
        self._member.counts.add(**{f"{kind}s": 1, "bytes": len(data)})

    def _state(self, _: ControlLink, state: str, reason: str) -> None:
        if not self.control.open:
            self._member.ended(self, f"{self.peer}: {state}: {reason}")

    async def leave(self) -> None:
        """Say how much was said, and close."""
        self.task.cancel()
        with contextlib.suppress(MlxcelError):
            await self.control.drain()
            self.control.send({"type": "last", "sent": self.sent})
            await self.control.drain()
        self.control.close("leaves")


class Heat(threading.Thread):
    """One hot link: rounds of tensors, led by the side that dialled.

    Args:
        kind: "hot", over TCP, or "memory".
    """

    def __init__(self, member: Member, link: Link, kind: str) -> None:
        super().__init__(name=f"{kind}-{link.peer.node_id}", daemon=True)
        self._member = member
        self.peer = link.peer.node_id
        self._moves = kind == "memory"
        self._leads = link.dialled
        self._link = HotLink(link)
        self.rounds = 0
        self.stopping = False
        self.start()

    def run(self) -> None:
        try:
            if self._moves:
                self._move()
            while self._go_on():
                self.rounds += 1
                for sends in (self._leads, not self._leads):
                    (self._send if sends else self._receive)()
                time.sleep(ROUND_S)  # the pace of the soak
            self._link.close("leaves")
        except MlxcelError as error:
            self._member.counts.ends.append(f"{self.peer}: {self.name}: {error}")
            self._link.close()

    def _move(self) -> None:
        link = self._link.link
        if reason := agree(self._link, partial(SharedMemoryOffer, link)):
            self._member.counts.error(f"no shared memory with {self.peer}: {reason}")
        else:
            self._member.rekey_often(self._link._sealer)

    def _go_on(self) -> bool:
        """Whether there is another round: the leader says so."""
        if self._leads:
            self._link.send_control({"on": not self.stopping, "round": self.rounds})
            return not self.stopping
        said = self._link.recv_control()
        if said["round"] != self.rounds:
            self._member.counts.error(f"{self.peer} is in round {said['round']}, this side in {self.rounds}")
        return bool(said["on"])

    def _tensors(self) -> range:
        """Numbers of this round's tensors; in a slow round more than a channel has credits."""
        first = self.rounds * 1000
        return range(first, first + (100 if self._slow else 5))

    @property
    def _slow(self) -> bool:
        return self.rounds % SLOW_ROUNDS == 0

    def _send(self) -> None:
        for number in self._tensors():
            data = content("tensor", number)
            self._link.send_tensor(Tag(1, self.rounds, number), "uint8", (len(data),), data)

    def _receive(self) -> None:
        if self._slow:
            time.sleep(SLOW_S)  # a slow reader is what this round is about
        for number in self._tensors():
            got = self._link.recv_tensor(Tag(1, self.rounds, number))
            data = content("tensor", number)
            if got.data != data:
                self._member.counts.error(f"tensor {number} of {self.peer} is not what was sent")
            self._member.counts.add(tensors=1, in_memory=int(self._moves), bytes=len(data))


class Member:
    """All links of this process. On its loop, but for the hot threads."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.counts = Counts()
        self.counts.watch()
        self.hushed = False
        self._name = told["name"]
        self._secret = Secret(bytes.fromhex(told["secret"]))
        self._rekey_every = told["rekey_every"]
        self._me = Identity(cluster=CLUSTER, node_id=self._name, role="worker", incarnation=new_incarnation())
        self._shapes = parse_links(told["links"], told["members"]).seen_from(self._name)
        self._talks: set[Talk] = set()
        self._heats: set[Heat] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = Listener(
            self._me,
            [self._secret],
            on_link=self._take,
            rekey_every=self._rekey_every,
            shapes=self._shapes,
        )

    async def listen(self) -> str:
        return str(await self._listener.start())

    def _take(self, link: Link, kind: str = "") -> None:
        """Drive `link`, as its dialling end said what for; that end itself says `kind`."""
        self.counts.add(links=1)
        kind = kind or link.peer.hello["link"]
        if kind == "control":
            self._talks.add(Talk(self, link))
        else:
            self._heats = {heat for heat in self._heats if heat.is_alive()} | {Heat(self, link, kind)}

    def rekey_often(self, sealer: Any) -> None:
        """As the links' own sealers do, which are told so when they are made."""
        sealer._rekey_every = self._rekey_every

    def ended(self, talk: Talk, how: str) -> None:
        self._talks.discard(talk)
        self.counts.ends.append(how)

    async def join(self, address: str, kinds: Sequence[str], *, renew: bool = False) -> None:
        """Open a link of each kind to the member at `address`; `renew` replaces the control link again and again."""
        for kind in kinds:
            hello = {"link": kind}
            link = await dial(
                self._me,
                self._secret,
                address,
                hello=hello,
                rekey_every=self._rekey_every,
                shapes=self._shapes,
                deadline=20.0,
            )
            self._take(link, kind)
        if renew:
            asyncio.get_running_loop().call_later(RENEW_S, self._renew, address)

    def _renew(self, address: str) -> None:
        if self.hushed:
            return
        for talk in [talk for talk in self._talks if talk.control.peer.where == address]:
            self._talks.discard(talk)
            self._keep(talk.leave())
        self._keep(self.join(address, ["control"], renew=True))

    def _keep(self, coro: Any) -> None:
        """Run `coro`; what goes wrong in it is an error of the soak's."""
        task = asyncio.get_running_loop().create_task(coro)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()):
                self.counts.error(f"{self._name}: {error}")

        self._tasks.add(task)
        task.add_done_callback(done)

    def facts(self) -> dict[str, Any]:
        """Totals, errors, ends, and how far each standing link has come."""
        return {
            **own_facts(),
            "threads": threading.active_count(),
            "totals": self.counts.totals,
            "errors": self.counts.errors,
            "ends": self.counts.ends,
            "talks": {talk.peer: {"sent": talk.sent, "got": talk.got} for talk in self._talks},
            "heats": {heat.name: heat.rounds for heat in self._heats if heat.is_alive()},
            "rings": _mapped_rings(),
        }

    async def end(self) -> None:
        """Leave every link politely."""
        self.hushed = True
        for heat in self._heats:
            heat.stopping = True
        await asyncio.gather(*(talk.leave() for talk in list(self._talks)))
        for heat in list(self._heats):
            if heat._leads:
                await asyncio.to_thread(heat.join, 20)
        await self._listener.close()


def _mapped_rings() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_text().count("/memfd:mlxcel-nb") if maps.exists() else 0


async def main() -> None:
    loop = asyncio.get_running_loop()
    reader = concurrent.futures.ThreadPoolExecutor(1, "orders")

    async def order() -> dict[str, Any]:
        line = await loop.run_in_executor(reader, sys.stdin.readline)
        said: dict[str, Any] = json.loads(line) if line else {"do": "end"}
        return said

    member = Member(await order())
    say(address=await member.listen())
    while (told := await order())["do"] != "end":
        if told["do"] == "join":
            await member.join(told["address"], told["kinds"], renew=told["renew"])
            say(joined=told["address"])
        elif told["do"] == "hush":
            member.hushed = True
            say(hushed=True)
        else:
            say(**member.facts())
    await member.end()
    say(**member.facts())


if __name__ == "__main__":
    raise_limit()
    asyncio.run(main())
