"""One end of a link on one host: ours, over TCP or in shared memory, TLS 1.3 through `ssl`, or a plain socket.

    python -m benchmarks.sides.link_end RANK 2 KIND

Rank 0 measures. All of them keep their buffers from one transfer to the next, and have TCP_NODELAY.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import serve
from benchmarks.sides.joining import hot_links
from mlxcel_nb.net.hot.hot_link import MAX_SPIN_S, HotLink
from mlxcel_nb.net.hot.tag import Tag

WAIT_S = 60.0
WARM = 20


class End(ABC):
    """What is measured, whatever carries it."""

    about: dict[str, Any]

    @abstractmethod
    def send(self, data: memoryview) -> None:
        """All of `data`."""

    @abstractmethod
    def receive(self, size: int, *, poll: bool) -> memoryview:
        """`size` bytes, in memory that is used again; `poll`: without ever blocking."""

    def round_trip(self, rank: int, size: int, count: int, poll: bool) -> dict[str, Any]:
        """Microseconds for `size` bytes there and back."""
        data = memoryview(bytearray(size))
        times = []
        for _ in range(WARM + count):
            began = time.perf_counter()
            if rank == 0:
                self.send(data)
                self.receive(size, poll=poll)
            else:
                self.send(self.receive(size, poll=poll))
            times.append((time.perf_counter() - began) * 1e6)
        return {"us": float(np.median(times[WARM:]))}

    def bulk(self, rank: int, size: int, count: int) -> dict[str, Any]:
        """Gigabytes a second, from the first byte's sending until the receiver has said that it has all."""
        data = memoryview(np.ones(size, np.uint8))
        times = []
        for _ in range(1 + count):
            began = time.perf_counter()
            if rank == 0:
                self.send(data)
                self.receive(1, poll=False)
            else:
                self.receive(size, poll=False)
                self.send(data[:1])
            times.append(time.perf_counter() - began)
        return {"gb_s": size / 1e9 / float(np.median(times[1:]))}


class Ours(End):
    """An encrypted hot link."""

    shared_memory = False

    def __init__(self, rank: int) -> None:
        self._link: HotLink = hot_links(rank, 2, spin=True, shared_memory=self.shared_memory)[1 - rank]
        self._to_send, self._to_receive = Tag(1, 0, 0), Tag(1, 0, 0)
        self.about = {"suite": self._link.link.suite_name}

    def send(self, data: memoryview) -> None:
        self._link.send_tensor(self._to_send, "uint8", (len(data),), data)
        self._to_send = _after(self._to_send)

    def receive(self, size: int, *, poll: bool) -> memoryview:
        self._link.spin.most_s = WAIT_S if poll else MAX_SPIN_S
        tag, self._to_receive = self._to_receive, _after(self._to_receive)
        got = self._link.recv_tensor(tag).data
        assert len(got) == size
        return got


def _after(tag: Tag) -> Tag:
    """Made while the other end is busy, as whoever computes with a link has its tags ready."""
    return Tag(1, tag.step + 1, 0)


class InMemory(Ours):
    """An encrypted hot link that has moved to shared memory, as those between engines of one host do."""

    shared_memory = True


class Plain(End):
    """A blocking socket."""

    def __init__(self, rank: int) -> None:
        self._sock = meet(rank)
        self._buffer = memoryview(bytearray(1))
        self.about = {}

    def send(self, data: memoryview) -> None:
        self._sock.setblocking(True)
        self._sock.sendall(data)

    def receive(self, size: int, *, poll: bool) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        self._sock.setblocking(not poll)
        got = 0
        while got < size:
            try:
                count = self._sock.recv_into(self._buffer[got:size])
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            assert count, "the other end is gone"
            got += count
        return self._buffer[:size]


class Tls(Plain):
    """TLS 1.3 with AES-256-GCM, as Python's `ssl` does it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        if rank == 0:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certify(context)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        tls = context.wrap_socket(self._sock, server_side=rank == 1)
        self._sock = tls
        cipher = tls.cipher()
        self.about = {"version": tls.version(), "cipher": cipher and cipher[0], "openssl": ssl.OPENSSL_VERSION}


def meet(rank: int) -> socket.socket:
    """A connection between the two: rank 1 listens."""
    port = json.loads(sys.stdin.readline())["ports"][1]
    if rank == 1:
        with socket.create_server(("127.0.0.1", port)) as listener:
            sock = listener.accept()[0]
    else:
        end = time.monotonic() + WAIT_S
        while True:
            try:
                sock = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def certify(context: ssl.SSLContext) -> None:
    """A certificate made for this moment."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "benchmark")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "both.pem"
        path.touch(mode=0o600)
        plain, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        path.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, plain, no_password)
            + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(path)


def main(rank: int, kind: str) -> None:
    kinds: dict[str, Callable[[int], End]] = {"ours": Ours, "shared-memory": InMemory, "tls": Tls, "plain": Plain}
    end = kinds[kind](rank)

    def run(what: str, **order: Any) -> dict[str, Any]:
        result: dict[str, Any] = getattr(end, what)(rank, **order)
        return result

    serve({**end.about, "pid": os.getpid()}, run)


main(int(sys.argv[1]), sys.argv[3])
