"""How the processes of a side that has several are told of each other."""

from __future__ import annotations

import secrets
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import Side


def by_dialling(sides: list[Side]) -> None:
    """For `sides.joining`: each is told the secret and says its port, then all are told all ports."""
    secret = secrets.token_hex(32)
    ports = [side.ask({"secret": secret})["port"] for side in sides]
    for side in sides:
        side.say(ports)
    for side in sides:
        side.about = side.hear()


def by_ports(sides: list[Side]) -> None:
    """For what opens its own sockets: as many ports as there are processes, free a moment ago."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in sides]
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    for side in sides:
        side.say({"ports": ports})
    for side in sides:
        side.about = side.hear()
