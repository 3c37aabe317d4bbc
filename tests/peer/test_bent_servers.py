"""Every bent server is left by `net ping` as the contract says, by one process that goes on. Case 49."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.peer.bends import Act, Bend, check, end_of_frames
from tests.peer.bends_frames import DROPPED_ROWS, FIRST_ROWS, FRAME_ROWS
from tests.peer.bends_server import SERVER_ROWS
from tests.peer.ends import SECRET, START_S, Base
from tests.peer.peer import Ended, Peer


class Dialler:
    """A process that runs `net ping` as often as it is asked to, and the socket that the pings come to."""

    def __init__(self, server: socket.socket, process: subprocess.Popen[str], secret: str) -> None:
        self._server, self._process, self._secret = server, process, secret

    def meet(self, serve: Callable[[Peer], None], count: int = 2) -> tuple[int, str]:
        """Let it ping `count` times; each connection it makes is given to `serve`. Its status, and what it said."""
        host, port = self._server.getsockname()
        self._process.stdin.write(f"net ping --secret-file {self._secret} --count {count} {host}:{port}\n")
        self._process.stdin.flush()
        problems: list[BaseException] = []
        over = threading.Event()

        def accept() -> None:
            while not over.is_set():
                try:
                    sock, _ = self._server.accept()
                except TimeoutError:
                    continue
                try:
                    with Peer(sock, SECRET) as peer:
                        serve(peer)
                except BaseException as problem:  # noqa: BLE001 - it is raised where the test can see it
                    problems.append(problem)

        accepting = threading.Thread(target=accept)
        accepting.start()
        said = ""
        try:
            while not (status := re.search(r"STATUS (\d+)\n", said)):
                line = self._process.stdout.readline()
                assert line, f"the process ended:\n{said}"
                said += line
        finally:
            over.set()
            accepting.join()
        if problems:
            raise problems[0]
        return int(status[1]), said[: status.start()]


@pytest.fixture(scope="module")
def dialler(files: dict[str, str]) -> Iterator[Dialler]:
    """When its tests are over its descriptors and its memory must be as they were after the first ping."""
    script = Path(__file__).with_name("dialler.py")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.02)  # how soon the accepting thread sees that a ping is over
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            dialler = Dialler(server, process, files["secret"])
            assert dialler.meet(honest)[0] == 0
            base = Base(process.pid)
            yield dialler
            assert dialler.meet(honest)[0] == 0
            base.check()
        finally:
            process.stdin.close()
            try:
                process.wait(START_S)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()


def honest(peer: Peer) -> None:
    list(peer.be_server().frames())
    peer.farewell()


def end_of_client(peer: Peer, act: Act) -> str:
    """What a client does that met `act`."""
    act(peer)
    proof = 3 in peer.sent
    try:
        if not proof:
            peer.hear_client_proof()
            proof = True
        more = peer.read(1)
    except Ended as ended:
        return ("proof" if proof else "closed") + (" cut short" if ended.within else "")
    raise AssertionError(f"{more!r} behind the end")


def shown_safely(said: str) -> bool:
    return all(character.isprintable() for line in said.splitlines() for character in line)


@pytest.mark.parametrize("row", SERVER_ROWS, ids=str)
def test_a_bent_server(row: Bend, dialler: Dialler) -> None:
    for act in row.acts:
        ends: list[str] = []

        def serve(peer: Peer, act: Act = act, ends: list[str] = ends) -> None:
            ends.append(end_of_client(peer, act))

        status, said = dialler.meet(serve)
        assert ends and set(ends) <= set(row.due.split(" or ")), f"{row.name}: {ends} in place of {row.due}\n{said}"
        assert len(ends) == 1 or row.name in {"Reject 5", "a hello cut at each byte"}, f"{len(ends)} connections"
        assert status == 1 and said.startswith("error: ") and "Traceback" not in said
        assert re.search(row.words, said), said
        assert shown_safely(said), said


@pytest.mark.parametrize("row", [*FIRST_ROWS, *FRAME_ROWS, *DROPPED_ROWS], ids=str)
def test_bent_frames_of_a_server(row: Bend, dialler: Dialler) -> None:
    """Case 49: with the right key and with the wrong one."""

    def serve(peer: Peer, act: Act) -> None:
        peer.be_server(greet=row not in FIRST_ROWS)
        act(peer)
        end = end_of_frames(peer)
        check(row, end)
        if end[0] == "served":
            with contextlib.suppress(Ended):
                list(peer.frames())
            peer.farewell()

    for act in row.acts:
        status, said = dialler.meet(functools.partial(serve, act=act))
        assert status == (0 if row.due == "served" else 1), said
        assert status == 0 or re.search("^error: ", said, re.MULTILINE)
        assert "Traceback" not in said and shown_safely(said), said


SAME = "Install the same mlxcel-nb on both"


@pytest.mark.parametrize("name", ["unknown schemas", "a bit flipped in the length", "unknown kinds"])
def test_whoever_meets_bent_frames_is_told_where_and_what_to_do(name: str, dialler: Dialler) -> None:
    row = next(row for row in (*FIRST_ROWS, *FRAME_ROWS) if row.name == name)
    where: list[str] = []

    def serve(peer: Peer) -> None:
        where.append("{}:{}".format(*peer.sock.getsockname()))
        peer.be_server(greet=row not in FIRST_ROWS)
        row.acts[0](peer)
        end_of_frames(peer)

    status, said = dialler.meet(serve)
    assert status == 1 and where[0] in said and SAME in said
    assert "silent" not in said, "it was not"
