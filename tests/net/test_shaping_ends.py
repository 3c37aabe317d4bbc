"""Links made slower: every way in which one ends comes through, in its time or at once."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcel_nb.errors import PeerLost
from tests.net.helpers import SECRET, Heard, listening, run
from tests.net.shaped import SLACK_S, nothing_stays, pair, read_all, shaped, shaped_hot
from tests.waiting import until

REPO = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    with nothing_stays():
        yield


def test_a_goodbye_arrives_behind_what_was_sent_before_it() -> None:
    async def case() -> None:
        async with shaped("30ms") as (ours, theirs):
            here, there = Heard(ours), Heard(theirs)
            began = time.monotonic()
            for number in range(20):
                here.link.send({"type": "x", "number": number})
            here.link.close("enough")
            assert await there.states.get() == ("closed", "enough")
            assert time.monotonic() - began >= 0.030
            assert [there.messages.get_nowait()["number"] for _ in range(20)] == list(range(20))

    run(case())


def test_an_end_comes_through_in_both_directions() -> None:
    near, far = pair("10ms")
    near.send(b"to the peer")
    near.shutdown(socket.SHUT_WR)
    assert read_all(far) == b"to the peer"
    far.send(b"and back")
    far.close()
    assert read_all(near) == b"and back"
    near.close()


def test_a_reset_ends_the_owners_reads_and_writes_at_once() -> None:
    near, far = pair("2s")
    near.send(b"on its way for two seconds")
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    began = time.monotonic()
    assert near.recv(1) == b""
    assert time.monotonic() - began < SLACK_S
    near.close()


def test_a_peer_that_is_gone_takes_no_more() -> None:
    near, far = pair("1ms")
    far.close()

    def refused() -> bool:
        try:
            near.send(b"x")
        except OSError:
            return True
        return False

    assert until(refused)
    near.close()


def test_a_lost_link_is_noticed_by_its_hot_owner() -> None:
    with shaped_hot("5ms") as (here, there):
        there.link.hang_up()
        with pytest.raises(PeerLost, match="ended without a goodbye"):
            here.recv_control()


def test_a_process_that_ends_still_says_what_it_said_last() -> None:
    """Its farewell is on its way for 0.3 s when it has nothing more to do."""
    program = """
        import asyncio, sys
        from mlxcel_nb.cluster.secret import Secret
        from mlxcel_nb.cluster.shape import parse_link
        from mlxcel_nb.net.control.control_link import ControlLink
        from mlxcel_nb.net.links.dial import dial
        from mlxcel_nb.wire.handshake import Identity

        async def main():
            me = Identity(cluster="test", node_id="child", role="worker", incarnation=bytes(15) + b"1")
            secret = Secret(bytes.fromhex(sys.stdin.readline()))
            shape = parse_link("300ms")
            link = ControlLink(await dial(me, secret, sys.argv[1], shapes=lambda _: shape), on_state=print)
            link.send({"type": "last words"})
            link.close("off I go")

        asyncio.run(main())
    """

    async def case() -> None:
        async with listening() as (_, address, links):
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                textwrap.dedent(program),
                str(address),
                cwd=REPO,
                stdin=subprocess.PIPE,
            )
            assert child.stdin is not None
            child.stdin.write(SECRET.reveal().hex().encode() + b"\n")
            heard = Heard(await links.get())
            assert await heard.states.get() == ("closed", "off I go")
            assert heard.messages.get_nowait() == {"type": "last words"}
            assert await child.wait() == 0

    run(case())
