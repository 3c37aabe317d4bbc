"""An engine whose node is a listening socket: for tests of how clusters live and die."""

from __future__ import annotations

import socket
import sys

from mlxcel_nb.cluster.address import Address
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.launch import engine
from mlxcel_nb.launch.handover import JoinRequest

_open: list[socket.socket] = []


def listen(request: JoinRequest, secret: Secret) -> Address:
    _open.append(socket.create_server((request.bind, 0)))
    return Address(*_open[-1].getsockname())


if __name__ == "__main__":
    sys.exit(engine.main(sys.argv[1:], start_node=listen))
