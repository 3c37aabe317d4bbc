"""A capture of the loopback interface, and the TCP streams in it."""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 20.0
MAX_BYTES = 1 << 30
"""tcpdump is ended at this size: another program on this machine floods the interface, and the disk is not ours."""

Port = int
Flow = tuple[Port, Port]
"""Source and destination. Ports tell the streams of one host apart."""


class Capture:
    """What tcpdump writes. To be read when it has ended."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def streams(self) -> dict[Flow, bytes]:
        """The bytes of each direction of each TCP connection, in the order in which they passed."""
        found: dict[Flow, bytearray] = {}
        for flow, data in _segments(self.file.read_bytes()):
            found.setdefault(flow, bytearray()).extend(data)
        return {flow: bytes(data) for flow, data in found.items()}


@contextmanager
def capturing(file: Path) -> Iterator[Capture]:
    """Capture all of loopback, whole packets, while the block runs."""
    tcpdump = shutil.which("tcpdump", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if tcpdump is None:
        _leave_out("there is no tcpdump on this machine; Debian: apt-get install tcpdump")
    interface = "lo0" if sys.platform == "darwin" else "lo"
    user = ["-Z", "root"] if os.getuid() == 0 and sys.platform == "linux" else []  # else it gives root up, and the file
    process = subprocess.Popen(
        [str(tcpdump), "-i", interface, "-w", str(file), "-s", "0", "-U", "-n", "-B", "65536", *user, "tcp"],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    try:
        if hasattr(resource, "prlimit"):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
        said = _until_listening(process)
        if process.poll() is not None:
            _leave_out(f"tcpdump may not capture here: {said.strip()}")
        yield Capture(file)
        _until_through(file)
        assert process.poll() is None, "tcpdump ended before its time"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            _, tail = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
    assert b"\n0 packets dropped by kernel" in tail, f"the capture has holes: {tail.decode()}"


def _leave_out(why: str) -> None:
    if os.environ.get("MLXCEL_NB_REQUIRE_ALL"):
        pytest.fail(why)
    pytest.skip(why)  # a user need be neither root nor the owner of a packet sniffer


def _until_listening(process: subprocess.Popen[bytes]) -> str:
    """Wait for tcpdump's word that it listens, or for its end; what it said."""
    assert process.stderr is not None
    said = b""
    deadline = time.monotonic() + START_S
    while b"listening on" not in said:
        left = deadline - time.monotonic()
        assert left > 0, f"tcpdump did not begin within {START_S:g} s: {said.decode()}"
        if select.select([process.stderr], [], [], left)[0]:
            data = os.read(process.stderr.fileno(), 4096)
            if not data:
                process.wait(10)
                break
            said += data
    return said.decode()


def _until_through(file: Path) -> None:
    """Send a mark through the interface and wait until it is in the file: all before it is there as well."""
    mark = os.urandom(24).hex().encode()
    speak_plainly(mark)
    deadline = time.monotonic() + START_S
    while mark not in file.read_bytes():
        assert time.monotonic() < deadline, f"the capture was not written out within {START_S:g} s"
        time.sleep(0.05)  # the pace of the looks, not what is waited for


def speak_plainly(data: bytes) -> None:
    """Send `data` over a TCP connection to ourselves, as it is."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.sendall(data)
            got = b""
            while len(got) < len(data):
                got += receiver.recv(len(data))


_LINK_HEADERS = {0: 4, 1: 14, 113: 16, 276: 20}
"""Bytes in front of the IP header, by the kind of link: BSD loopback, Ethernet, Linux "any" 1 and 2."""

_BYTE_ORDERS = {"d4c3b2a1": "<", "4d3cb2a1": "<", "a1b2c3d4": ">", "a1b23c4d": ">"}


def _segments(data: bytes) -> Iterator[tuple[Flow, bytes]]:
    """Every TCP segment of a classic pcap file that carries data."""
    order = {b"\xd4\xc3\xb2\xa1": "<", b"\xa1\xb2\xc3\xd4": ">", b"\x4d\x3c\xb2\xa1": "<", b"\xa1\xb2\x3c\x4d": ">"}[
        data[:4]
    ]
    link = _LINK_HEADERS[struct.unpack_from(f"{order}I", data, 20)[0] & 0xFFFF]
    at = 24
    while at + 16 <= len(data):
        kept, length = struct.unpack_from(f"{order}II", data, at + 8)
        assert kept == length, "a packet was cut short"
        at += 16
        packet = data[at + link : at + kept]
        at += kept
        version = packet[0] >> 4
        if version == 4 and packet[9] == socket.IPPROTO_TCP:
            segment = packet[(packet[0] & 15) * 4 : int.from_bytes(packet[2:4], "big") or len(packet)]
        elif version == 6 and packet[6] == socket.IPPROTO_TCP:
            segment = packet[40 : 40 + (int.from_bytes(packet[4:6], "big") or len(packet))]
        else:
            continue
        source, destination = struct.unpack_from("!HH", segment)
        if payload := segment[(segment[12] >> 4) * 4 :]:
            yield (source, destination), payload
