"""`net listen` and `net ping` as a user starts them, and what the second implementation meets there."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.peer.peer import Peer
from tests.waiting import until

SECRET = bytes(range(7, 39)).hex().encode()
OLDER = bytes(range(99, 131)).hex().encode()
STRANGER = b"f" * 64
SUITES = {1: "aes-256-gcm", 2: "chacha20-poly1305"}
START_S = 40.0


class Command:
    """A running `mlxcel-nb`, or another program in Python, with the lines it has printed."""

    def __init__(self, arguments: list[str], program: tuple[str, ...] = ("-m", "mlxcel_nb")) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []
        self._arrived: queue.Queue[str] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in (self.process.stdout, self.process.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Iterator[str]) -> None:
        for line in stream:
            self.lines.append(line.rstrip("\n"))
            self._arrived.put(line)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, seconds: float = START_S) -> re.Match[str]:
        """The first match in what was printed so far or is printed within `seconds`."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.text)):
            left = end - time.monotonic()
            assert left > 0, f"no {pattern!r} in:\n{self.text}"
            with contextlib.suppress(queue.Empty):
                self._arrived.get(timeout=min(left, 1))
            assert found or self.process.poll() is None or not self._drained(), (
                f"ended without {pattern!r}:\n{self.text}"
            )
        return found

    def _drained(self) -> bool:
        """Whether everything an ended process printed is in `lines`, and nothing new came."""
        before = len(self.lines)
        for reader in self._readers:
            reader.join(2)
        return len(self.lines) == before

    def end(self, seconds: float = START_S) -> int:
        """Exit status; a process that does not end by itself is killed and is an error."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"still running:\n{self.text}") from None
        for reader in self._readers:
            reader.join(5)
        return status


@contextlib.contextmanager
def command(*arguments: str, program: tuple[str, ...] = ("-m", "mlxcel_nb")) -> Iterator[Command]:
    running = Command(list(arguments), program)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()
        for reader in running._readers:
            reader.join(5)
        for stream in (running.process.stdout, running.process.stderr):
            stream.close()


SLACK_BYTES = 48 << 20
"""Of memory: buffers that grow once are kept, and the allocator holds a freed frame of the largest size back."""


class Base:
    """What a process has open and holds when all is well, to be compared with later."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._descriptors, self._memory = self._process.num_fds(), self._process.memory_info().rss

    def check(self) -> None:
        """Fails when the process is gone, or has not come back to its base."""
        assert self._process.is_running()
        assert until(lambda: self._process.num_fds() <= self._descriptors), (
            f"{self._process.num_fds()} descriptors, {self._descriptors} before"
        )
        grown = self._process.memory_info().rss - self._memory
        assert grown < SLACK_BYTES, f"memory has grown by {grown} bytes"


class Listener:
    """A running `net listen`."""

    def __init__(self, running: Command, host: str, port: int, suite: int, secret: bytes) -> None:
        self.command, self.address, self._suite, self._secret = running, (host, port), suite, secret
        self.process = psutil.Process(running.process.pid)
        self.visit()
        self._base = Base(running.process.pid)

    def visit(self) -> None:
        """A proper peer is served at once, with the largest ping too."""
        with self.dial() as peer:
            peer.be_client()
            for filler in (0, 1 << 20):
                peer.ping(bytes(filler))
                peer.pong()
            peer.close("thank you")

    def check_base(self) -> None:
        """Whatever came meanwhile: it lives, serves, and holds no more than at its start."""
        self.visit()
        self._base.check()

    def dial(self, secret: bytes = b"", **options: object) -> Peer:
        """A connection by the listener's own secret, or by another."""
        return Peer.dial(self.address, secret or self._secret, **{"suite": self._suite} | options)


def secret_files(folder: Path) -> dict[str, str]:
    """Files of the secrets above, as `--secret-file` wants them."""
    files = {}
    for name, secret in (("secret", SECRET), ("older", OLDER), ("stranger", STRANGER)):
        path = folder / name
        path.write_bytes(secret + b"\n")
        path.chmod(0o600)
        files[name] = str(path)
    return files


@contextlib.contextmanager
def net_listen(files: dict[str, str], *options: str) -> Iterator[Listener]:
    suite = (
        {name: number for number, name in SUITES.items()}[options[options.index("--suite") + 1]]
        if "--suite" in options
        else 1
    )
    with command("net", "listen", "--secret-file", files["secret"], "--bind", "127.0.0.1:0", *options) as running:
        found = running.wait_for(r"(?m)(\d+\.\d+\.\d+\.\d+):(\d+)")
        secret = Path(files["secret"]).read_bytes().rstrip(b"\n")
        yield Listener(running, found[1], int(found[2]), suite, secret)


@contextlib.contextmanager
def net_ping(files: dict[str, str], *options: str) -> Iterator[tuple[Command, socket.socket]]:
    """A running `net ping` and the socket it is to come to, which already listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(START_S)
        host, port = server.getsockname()
        with command("net", "ping", "--secret-file", files["secret"], *options, f"{host}:{port}") as running:
            yield running, server


def accept(server: socket.socket, secret: bytes = SECRET, **options: object) -> Peer:
    sock, _ = server.accept()
    return Peer(sock, secret, **options)
