"""What a listener grants strangers and members, seen from outside: places, seconds, verdicts."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.hosts import hosts
from tests.peer import codec, ends
from tests.peer.bends import end_of_frames, end_of_handshake
from tests.peer.ends import SECRET, Listener
from tests.peer.peer import Peer, Refused, Rejected
from tests.waiting import until

HANDSHAKE_S, FRAME_REST_S, PROBE_S = 5.0, 10.0, 1.0
LATE_S = 10.0
"""How much later a busy machine may be; sooner is never right."""

PLACES, ESTABLISHED = 64, 512

STEPS = (Peer.say_client_hello, Peer.hear_server_hello, Peer.say_client_proof, Peer.hear_verdict)


@pytest.fixture
def own(files: dict[str, str]) -> Iterator[Listener]:
    """A listener for one test."""
    with ends.net_listen(files) as running:
        yield running


@contextlib.contextmanager
def alive(peers: list[Peer]) -> Iterator[threading.Lock]:
    """Answers pings on all of `peers`, which may grow meanwhile: whoever is silent for six seconds is given up.

    Whoever holds the lock may take one out and use it.
    """
    over, turn = threading.Event(), threading.Lock()

    def answer() -> None:
        while not over.wait(0.05):  # others get the lock meanwhile
            with turn:
                by_socket = {peer.sock: peer for peer in list(peers)}
                ready, _, _ = select.select(list(by_socket), [], [], 0)
                for sock in ready:
                    frame = by_socket[sock].next_frame()
                    if frame.kind == codec.PING:
                        by_socket[sock].send(codec.PONG, frame.channel, frame.payload)

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        yield turn
    finally:
        over.set()
        answering.join()


# --------------------------------------------------------------------------------------------------- verdicts


def test_a_living_node_keeps_its_id_and_another_process_gets_verdict_3(listener: Listener) -> None:
    with listener.dial(node_id="twin") as first, listener.dial(node_id="twin") as second:
        with alive([first.be_client()]), pytest.raises(Refused) as refused:
            second.be_client()
        assert refused.value.code == 3


def test_the_same_process_may_connect_as_often_as_it_likes(listener: Listener) -> None:
    incarnation = os.urandom(16)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(listener.dial(node_id="many", incarnation=incarnation)) for _ in range(5)]
        for peer in peers:
            peer.be_client().ping()
        for peer in peers:
            peer.pong()


def test_a_restarted_node_is_let_in_after_a_second_and_its_dead_connection_closed(listener: Listener) -> None:
    """The old process does not answer pings any more; its socket is still there."""
    with listener.dial(node_id="restarted") as old, listener.dial(node_id="restarted") as new:
        old.be_client()
        before = time.monotonic()
        new.be_client().ping()
        new.pong()
        assert PROBE_S * 0.9 < time.monotonic() - before < PROBE_S + LATE_S
        assert "newer process" in old.last_words()


def test_an_id_belongs_to_the_address_it_came_from(listener: Listener) -> None:
    """Verdict 2: the first address seen for an id holds as long as that incarnation lives."""
    with listener.dial(node_id="bound") as first, alive([first.be_client()]):
        for incarnation in (first.hello.incarnation, os.urandom(16)):
            elsewhere = socket.create_connection(listener.address, source_address=("127.0.0.2", 0))
            with (
                Peer(elsewhere, SECRET, node_id="bound", incarnation=incarnation) as second,
                pytest.raises(Refused) as refused,
            ):
                second.be_client()
            assert refused.value.code == 2


def test_512_members_and_verdict_1_for_the_next(own: Listener) -> None:
    """Pending connections have places of their own: strangers take none of a member's, nor members theirs."""
    incarnation = os.urandom(16)
    peers: list[Peer] = []
    with contextlib.ExitStack() as stack, alive(peers) as turn:
        for _ in range(3):
            stack.enter_context(socket.create_connection(own.address))
        while len(peers) < ESTABLISHED:
            peer = stack.enter_context(own.dial(node_id="crowd", incarnation=incarnation))
            peers.append(peer.be_client())
        with own.dial() as late, pytest.raises(Refused) as refused:
            late.be_client()
        assert refused.value.code == 1
        with turn:
            leaver = peers.pop()
        leaver.close("room for one")
        with own.dial() as late:
            late.be_client().ping()
            late.pong()


# ------------------------------------------------------------------------------------------- the pending pool


def test_a_65th_pending_connection_takes_the_place_of_the_oldest_without_a_hello(own: Listener) -> None:
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(own.dial()) for _ in range(PLACES)]
        waiting[0].say_client_hello()
        waiting[0].hear_server_hello()
        with own.dial() as newcomer:
            newcomer.be_client().ping()
            newcomer.pong()
            assert end_of_handshake(waiting[1]) == ("closed", "")
            newcomer.farewell("done")
        waiting[0].say_client_proof()
        waiting[0].hear_verdict()


def test_a_pool_full_of_whole_hellos_turns_the_newcomer_away(own: Listener) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(PLACES):
            peer = stack.enter_context(own.dial())
            peer.say_client_hello()
            peer.hear_server_hello()
        with own.dial() as newcomer:
            assert end_of_handshake(newcomer)[0] == "Reject 5"
    assert until(lambda: let_in(own), 20), "the places of those who left are not free again"


def let_in(listener: Listener) -> bool:
    try:
        listener.visit()
    except Rejected as crowded:
        return crowded.code != 5
    return True


def test_64_proper_peers_at_once_all_get_in(own: Listener) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(own.dial()) for _ in range(PLACES)]
        for step in (
            Peer.say_client_hello,
            Peer.hear_server_hello,
            Peer.say_client_proof,
            Peer.hear_verdict,
            Peer.greet,
        ):
            for peer in peers:
                step(peer)


def test_a_ninth_pending_connection_of_one_host_gets_reject_5(files: dict[str, str]) -> None:
    """From a host of its own, as loopback has no such limit; other hosts do not feel it."""
    with hosts(3) as (server, crowd, guest):
        arguments = ("net", "listen", "--secret-file", files["secret"], "--bind", f"{server.address}:0")
        process = server.popen([sys.executable, "-m", "mlxcel_nb", *arguments], stdout=-1, text=True)
        port = int(process.stdout.readline().rpartition(":")[2])
        with contextlib.ExitStack() as stack:
            with crowd.inside():
                waiting = [stack.enter_context(Peer.dial((server.address, port), SECRET)) for _ in range(8)]
                with Peer.dial((server.address, port), SECRET) as ninth:
                    assert end_of_handshake(ninth)[0] == "Reject 5"
            with guest.inside(), Peer.dial((server.address, port), SECRET) as other:
                other.be_client().close("done")
            waiting[7].be_client().close("done")  # whoever has a place keeps it
        # An honest client tries again after a moment, and is let in when the strangers are gone.
        ping = crowd.run([sys.executable, "-m", "mlxcel_nb", "net", "ping", "--secret-file", files["secret"],
                          "--count", "2", f"{server.address}:{port}"])  # fmt: skip
        assert ping.returncode == 0, ping.stderr
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close()


# ------------------------------------------------------------------------------------------------------ times


def nothing(peer: Peer) -> None:
    """Not a byte."""


def dribble(data: bytes, peer: Peer) -> None:
    """A byte every half second, for longer than anybody may take."""
    with contextlib.suppress(OSError):
        for byte in data:
            peer.write(bytes([byte]))
            time.sleep(0.5)  # the pace is the case


def dribbled_hello(peer: Peer) -> None:
    dribble(codec.message(1, peer.hello.body())[:40], peer)


def hello_alone(peer: Peer) -> None:
    peer.say_client_hello()
    peer.hear_server_hello()


def no_first_frame(peer: Peer) -> None:
    peer.be_client(greet=False)


def half_a_length(peer: Peer) -> None:
    peer.be_client().write(b"\0\0")


def half_a_frame(peer: Peer) -> None:
    peer.be_client().write(struct.pack(">I", 100_000) + bytes(5000))


def dribbled_frame(peer: Peer) -> None:
    peer.be_client()
    dribble(struct.pack(">I", 100) + bytes(30), peer)


SLOW: list[tuple[Callable[[Peer], None], float, str]] = [
    (nothing, HANDSHAKE_S, "closed"),
    (dribbled_hello, HANDSHAKE_S, "closed"),
    (hello_alone, HANDSHAKE_S, "closed"),
    (no_first_frame, HANDSHAKE_S, "told"),
    (half_a_length, FRAME_REST_S, "told"),
    (half_a_frame, FRAME_REST_S, "told"),
    (dribbled_frame, FRAME_REST_S, "told"),
]
"""What is not done in time, the time, and the end."""


def test_whoever_is_slow_is_left_in_time_and_nobody_else_waits(own: Listener) -> None:
    """All of them at once, so that the test takes as long as the longest. A stalled frame header is cut too."""
    found: dict[str, tuple[float, str]] = {}

    def meet(act: Callable[[Peer], None], due: str) -> None:
        with own.dial() as peer:
            began = time.monotonic()
            act(peer)
            if due == "closed":
                end = end_of_handshake(peer)[0]
            else:  # a frame more would be the rest of the one that is missing
                peer.write = lambda data: None
                end = end_of_frames(peer)[0]
            found[act.__name__] = time.monotonic() - began, end

    slow = [threading.Thread(target=meet, args=(act, due)) for act, _, due in SLOW]
    for thread in slow:
        thread.start()
    while any(thread.is_alive() for thread in slow):
        own.visit()
        time.sleep(0.2)  # a visitor now and then
    assert {act.__name__: found[act.__name__][1] for act, _, _ in SLOW} == {act.__name__: due for act, _, due in SLOW}
    for act, seconds, _ in SLOW:
        assert seconds * 0.9 < found[act.__name__][0] < seconds + LATE_S, (act.__name__, found)
