"""Who is at the other end of a connection on loopback: Linux says which user's it is. Any thread may call.

Loopback is open to every user of a computer. Where the system tells whose socket the caller has, others than the
server's own user and root are turned away; where it does not (macOS), and for servers with a key, nobody is asked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

NOBODY = -1
"""Owner of what is left of a socket that has been closed: the kernel calls it root's, whoever it was, and nobody reads
the answer."""

Address = tuple[str, int]


def user_of(peer: Address, here: Address) -> int | None:
    """The user whose socket is at `peer`, connected to `here`; `NOBODY`; None where the system does not say."""
    try:
        return asked_of_kernel(peer, here)
    except (OSError, ValueError, AttributeError, struct.error):  # not Linux, or a container without the question
        return read_from_tables(peer, here)


def asked_of_kernel(peer: Address, here: Address) -> int:
    """The same by sock_diag(7), which finds one socket among thousands at once.

    Raises:
        OSError: it does not answer that, or there is no such socket. AttributeError: not Linux.
    """
    ips = [ipaddress.ip_address(host) for host, _ in (peer, here)]
    family = socket.AF_INET if ips[0].version == 4 else socket.AF_INET6
    ends = b"".join(ip.packed.ljust(16, b"\0") for ip in ips)
    wanted = struct.pack("!HH", peer[1], here[1]) + ends + struct.pack("=III", 0, *_ANY_COOKIE)
    body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE) + wanted
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(_KERNEL_S)
        kernel.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _REQUEST, 0, 0) + body)
        answer = kernel.recv(4096)
    if struct.unpack_from("=H", answer, 4)[0] != _BY_FAMILY:
        raise OSError("no such socket")
    user, inode = struct.unpack_from("=II", answer, _USER_AT)
    return int(user) if inode else NOBODY


_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_ANY_STATE, _ANY_COOKIE = 0xFFFFFFFF, (0xFFFFFFFF, 0xFFFFFFFF)
_USER_AT = 16 + 4 + 48 + 3 * 4
"""In an answer: after its head, four bytes of state, the addresses, a timer and two queues."""
_KERNEL_S = 1.0


def read_from_tables(peer: Address, here: Address, tables: Iterable[Path] = TABLES) -> int | None:
    """The same from the tables of proc(5): local address, remote address, and as the eighth column the user's id."""
    wanted = {(_spelled(peer, wide), _spelled(here, wide)) for wide in (False, True)}
    for table in tables:
        with contextlib.suppress(OSError, ValueError, IndexError), table.open() as lines:
            for line in lines:
                columns = line.split()
                if (columns[1], columns[2]) in wanted:
                    return int(columns[7]) if int(columns[9]) else NOBODY
    return None


def is_stranger(user: int | None) -> bool:
    """Whether a socket's owner is somebody else than us or root, who can do as he likes anyhow."""
    return user is not None and user not in (0, os.getuid())


def _spelled(address: Address, wide: bool) -> str:
    """An address as the tables have it: words of 32 bits in the machine's order, and the port.

    `wide` spells IPv4 as the IPv6 address that maps to it, as a socket for both has it.
    """
    host, port = address
    ip = ipaddress.ip_address(host)
    packed = ip.packed
    if wide and ip.version == 4:
        packed = ipaddress.ip_address(f"::ffff:{host}").packed
    words = [packed[i : i + 4] for i in range(0, len(packed), 4)]
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"
