"""Peers that read slowly, or never, cost little and hold nobody up."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

from mlxcel_nb.errors import PeerLost
from mlxcel_nb.net.links.dial import dial
from mlxcel_nb.net.links.link import Link
from mlxcel_nb.util import times
from tests.net.helpers import SECRET, Heard, control_pair, identity, listening, run

CHUNK = 64 * 1024
TEXT = "x" * 40_000


async def take_a_chunk_a_second(link: Link, taken: list[int]) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(link.sock, CHUNK):
        taken.append(len(data))
        await asyncio.sleep(1)  # the pace is the case


def test_slow_and_silent_readers_cost_little_and_others_do_not_notice():
    """Case 31: it answers no ping in time, since those stand behind what it has not read, but it reads."""

    async def case():
        async with listening() as (_, address, links):
            taken: list[int] = []
            mine, theirs = {}, {}
            for name in ("slow", "never", "healthy"):
                mine[name] = await dial(identity(name), SECRET, address)
                theirs[name] = Heard(await links.get())
            reading = asyncio.ensure_future(take_a_chunk_a_second(mine["slow"], taken))
            healthy = Heard(mine["healthy"])
            before = psutil.Process().memory_info().rss
            began = asyncio.get_running_loop().time()
            grown, trips = [], []
            while asyncio.get_running_loop().time() - began < times.DEAD_S + 2.5:
                for name in ("slow", "never"):
                    if theirs[name].link._out.queued_bytes < 4 << 20:
                        theirs[name].link.send({"text": TEXT})
                        theirs[name].link.send_stream({"text": TEXT})
                theirs["healthy"].link.send_stream({"text": "token"})
                assert await healthy.streamed.get() == {"text": "token"}
                trips.append(await healthy.link.ping())
                grown.append(psutil.Process().memory_info().rss - before)
                await asyncio.sleep(0.01)
            assert max(grown) < 20 << 20, max(grown)
            assert max(trips) < times.SUSPECT_S
            assert theirs["healthy"].link.state == healthy.link.state == "alive" and theirs["healthy"].states.empty()
            assert theirs["slow"].link.open and len(taken) >= times.DEAD_S / 2  # a busy machine's second is longer
            assert (await theirs["never"].states.get())[0] == "suspect"
            assert (await theirs["never"].states.get())[0] == "dead"
            reading.cancel()
            for name, link in mine.items():
                theirs[name].link.close()
                link.close()
            with contextlib.suppress(PeerLost):
                healthy.link.close()

    run(case(), 40)


def test_a_ping_does_not_stand_behind_what_waits():
    async def case():
        async with control_pair() as (ours, theirs):
            loop = asyncio.get_running_loop()
            loop.remove_reader(theirs.link._fd)
            for _ in range(200):
                ours.link.send({"text": TEXT})
            assert ours.link._out.queued_bytes > 1 << 20
            answer = asyncio.ensure_future(ours.link.ping())
            await asyncio.sleep(0)
            loop.add_reader(theirs.link._fd, theirs.link._readable)
            await answer
            assert theirs.messages.qsize() < 180
            for _ in range(200):
                assert (await theirs.messages.get())["text"] == TEXT

    run(case())


def test_order_is_kept_among_messages_and_streams_behind_a_full_socket():
    async def case():
        async with control_pair() as (ours, theirs):
            loop = asyncio.get_running_loop()
            loop.remove_reader(theirs.link._fd)
            for n in range(100):
                ours.link.send({"n": n, "text": TEXT})
                if n < 50:
                    ours.link.send_stream({"n": n})
            loop.add_reader(theirs.link._fd, theirs.link._readable)
            assert [(await theirs.messages.get())["n"] for _ in range(100)] == list(range(100))
            assert [(await theirs.streamed.get())["n"] for _ in range(50)] == list(range(50))
            await ours.link.drain()
            assert ours.link._out.queued_bytes == 0

    run(case())
