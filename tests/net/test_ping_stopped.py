"""A ping that is stopped ends at once, whatever it waits for, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mlxcel_nb.cluster.secret import Secrets
from mlxcel_nb.net.measuring.ping import ping
from mlxcel_nb.util import times
from mlxcel_nb.wire.frames import Kind
from tests.net.helpers import SECRET, listening, run
from tests.net.shaped import descriptors
from tests.waiting import started, until

SOON_S = times.HANDSHAKE_S / 2
"""Well below what connecting may take: one that is waited out is not mistaken for one that was ended."""


@contextlib.contextmanager
def silent() -> Iterator[socket.socket]:
    """A port that takes connections and says nothing, as that of a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@contextlib.contextmanager
def deaf() -> Iterator[socket.socket]:
    """A port where first packets vanish: its queue is full, and nobody empties it."""
    with contextlib.ExitStack() as held:
        server = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(server.getsockname())
        yield server


def where(server: socket.socket) -> str:
    return "{}:{}".format(*server.getsockname())


@pytest.mark.parametrize("there", [silent, deaf])
def test_connecting_ends_at_once_when_it_is_stopped(
    there: Callable[[], contextlib.AbstractContextManager[socket.socket]],
) -> None:
    async def case(address: str) -> tuple[float, int]:
        stop = asyncio.Event()
        pinging = asyncio.ensure_future(ping(address, Secrets(SECRET), stop=stop))
        await asyncio.sleep(0.3)  # it is in the middle of it by then, or has not begun: either ends
        began = time.monotonic()
        stop.set()
        await asyncio.wait({pinging}, timeout=20)
        assert pinging.cancelled()
        return time.monotonic() - began, len(asyncio.all_tasks())

    with there() as server:
        before, threads = descriptors(), threading.active_count()
        took, tasks = run(case(where(server)))
        assert took < SOON_S and tasks == 1
        assert until(lambda: descriptors() <= before and threading.active_count() <= threads)


@pytest.mark.parametrize("answered", [0, 2])
def test_a_pong_that_does_not_come_is_not_waited_for_when_there_are_to_be_no_more(answered: int) -> None:
    async def case() -> None:
        async with listening(cluster="mlxcel") as (_, address, links):
            stop, waits = asyncio.Event(), asyncio.Event()

            async def serve() -> None:
                link, loop, pongs = await links.get(), asyncio.get_running_loop(), 0
                while data := await loop.sock_recv(link.sock, 65536):
                    link.reader.feed(data)
                    while (frame := link.reader.next_frame()) is not None:
                        if frame.kind is Kind.PING and pongs < answered:
                            pong = link.sealer.seal(Kind.PONG, frame.channel, bytes(frame.payload))
                            await loop.sock_sendall(link.sock, pong)
                            pongs += 1
                        elif frame.kind is Kind.PING:
                            waits.set()

            serving = asyncio.ensure_future(serve())
            pinging = asyncio.ensure_future(ping(address, Secrets(SECRET), count=9, stop=stop))
            await waits.wait()
            began = time.monotonic()
            stop.set()
            await asyncio.wait({pinging}, timeout=20)
            assert time.monotonic() - began < SOON_S
            if answered:
                assert len(pinging.result().round_trips_s) == answered
            else:
                assert pinging.cancelled()
            await asyncio.gather(serving, return_exceptions=True)

    run(case())


@pytest.mark.parametrize("there", [silent, deaf])
def test_ctrl_c_ends_a_command_that_connects_within_a_second(
    there: Callable[[], contextlib.AbstractContextManager[socket.socket]], tmp_path: Path
) -> None:
    key = tmp_path / "secret"
    key.write_bytes(b"of this test, and long enough")
    key.chmod(0o600)
    took = []
    for _ in range(3):  # other tests share the machine: it must be possible
        with there() as server:
            words = ["net", "ping", where(server), "--secret-file", str(key)]
            with started(
                [sys.executable, "-m", "mlxcel_nb", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                each = psutil.Process(process.pid)
                assert until(functools.partial(each.net_connections, "tcp"), 20), "waited 20 s for it to connect"
                began = time.monotonic()
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=20)
                took.append(time.monotonic() - began)
        assert (process.returncode, out) == (130, "") and "Traceback" not in err
        if took[-1] < 1.0:
            break
    assert min(took) < 1.0, took
