"""A name server for tests, run on a host of `tests.hosts`: `python -m tests.net.name_server ADDRESS`.

It answers A and AAAA questions (RFC 1035, RFC 3596) over UDP by what the name says, so that a test can have each kind
of trouble under a name of its own: the first label is KIND or KIND-anything, the rest `A.B.C.D.test` written with
dashes: `late6.10-77-0-2.test`, `two-x.10-77-0-50_10-77-0-2.test`.

KIND: `plain`; `flaky` says "server failure" once for each type; `lost` does not answer the first question of each type;
`late6` answers A at once and AAAA after 5 s; `two` gives two addresses; `none` does not exist; `never` does not answer.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
import threading

A, AAAA = 1, 28
LATE_S = 5.0
_HEADER = struct.Struct("!6H")


def question(data: bytes) -> tuple[str, int, int]:
    """Name, type, and where the question ends."""
    labels, at = [], _HEADER.size
    while data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode())
        at += 1 + data[at]
    return ".".join(labels), struct.unpack_from("!H", data, at + 1)[0], at + 5


def answer(data: bytes, end: int, addresses: list[str], code: int = 0) -> bytes:
    number = _HEADER.unpack_from(data)[0]
    records = b"".join(
        b"\xc0\x0c" + struct.pack("!HHIH", A if ip.version == 4 else AAAA, 1, 1, len(ip.packed)) + ip.packed
        for ip in map(ipaddress.ip_address, addresses)
    )
    return _HEADER.pack(number, 0x8180 | code, 1, len(addresses), 0, 0) + data[_HEADER.size : end] + records


def serve(address: str) -> None:
    seen: set[tuple[str, int]] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 53))
        print("ready", flush=True)
        while True:
            data, sender = sock.recvfrom(512)
            name, kind, end = question(data)
            trouble, _, rest = name.lower().partition(".")
            trouble = trouble.partition("-")[0]
            texts = rest.removesuffix(".test").split("_")
            known = [text.replace("-", ".") for text in texts] if kind == A else []
            first = (name, kind) not in seen
            seen.add((name, kind))
            if trouble == "never" or (trouble == "lost" and first):
                continue
            if trouble == "flaky" and first:
                sock.sendto(answer(data, end, [], 2), sender)
            elif trouble == "none":
                sock.sendto(answer(data, end, [], 3), sender)
            elif trouble == "late6" and kind == AAAA:
                timer = threading.Timer(LATE_S, sock.sendto, (answer(data, end, []), sender))
                timer.daemon = True
                timer.start()
            else:
                sock.sendto(answer(data, end, known), sender)


if __name__ == "__main__":
    serve(sys.argv[1])
