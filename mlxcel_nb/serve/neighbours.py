"""Who is at the other end of a connection on loopback: Linux says which user's it is. Any thread may call.

Loopback is open to every user of a computer. Where the system tells whose socket the caller has, others than the
server's own user and root are turned away; where it does not (macOS), and for servers with a key, nobody is asked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from collections.abc import Iterable
from pathlib import Path

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def user_of(peer: tuple[str, int], here: tuple[str, int], tables: Iterable[Path] = TABLES) -> int | None:
    """The user whose socket is at `peer`, connected to `here`; None where the system does not say.

    The columns are those of proc(5): local address, remote address and, as the eighth, the user's id.
    """
    wanted = {(_spelled(peer, wide), _spelled(here, wide)) for wide in (False, True)}
    for table in tables:
        with contextlib.suppress(OSError, ValueError, IndexError), table.open() as lines:
            for line in lines:
                columns = line.split()
                if (columns[1], columns[2]) in wanted:
                    return int(columns[7])
    return None


def is_stranger(user: int | None) -> bool:
    """Whether a socket's owner is somebody else than us or root, who can do as he likes anyhow."""
    return user is not None and user not in (0, os.getuid())


def _spelled(address: tuple[str, int], wide: bool) -> str:
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
