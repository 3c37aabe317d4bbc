"""`python -m benchmarks.sides.attacker HOST PORT COUNT silent|drip`: strangers who hold on to a port.

Keeps COUNT connections open: one that the listener closes is opened again within two seconds. They send nothing, or the
bytes of a good ClientHello, one a second. Says `{"opened": COUNT}` once every one has been open, and ends, with what
it counted, at a line on standard input.
"""

from __future__ import annotations

import errno
import json
import random
import select
import socket
import sys
import time

from benchmarks.sides.guarded import CLUSTER, raise_limit
from mlxcel_nb.cluster.names import new_incarnation
from mlxcel_nb.cluster.secret import Secret
from mlxcel_nb.wire.handshake import ClientHandshake, Identity

AGAIN_S = 1.0
"""Between two bytes, and on average between a connection's end and the next one."""


class Stranger:
    """One place in the flood."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.connected = False
        self.ever = False
        self.sent = 0
        self.next = 0.0


def main(host: str, port: int, count: int, drips: bool) -> None:
    me = Identity(cluster=CLUSTER, node_id="stranger", role="worker", incarnation=new_incarnation())
    hello = ClientHandshake(me, Secret(bytes(32))).data_to_send()
    strangers = [Stranger() for _ in range(count)]
    by_fd: dict[int, Stranger] = {}
    epoll = select.epoll()
    epoll.register(0, select.EPOLLIN)
    told = 0
    opened = closed = failed = 0

    def drop(stranger: Stranger, now: float) -> None:
        assert stranger.sock is not None
        del by_fd[stranger.sock.fileno()]
        epoll.unregister(stranger.sock)
        stranger.sock.close()
        stranger.sock, stranger.connected, stranger.sent = None, False, 0
        stranger.next = now + 2 * AGAIN_S * random.random()

    while True:
        now = time.monotonic()
        for stranger in strangers:
            if stranger.next > now:
                continue
            if stranger.sock is None:
                stranger.sock = socket.socket()
                stranger.sock.setblocking(False)
                by_fd[stranger.sock.fileno()] = stranger
                epoll.register(stranger.sock, select.EPOLLIN | select.EPOLLOUT)
                stranger.next = now + 10 * AGAIN_S
                if stranger.sock.connect_ex((host, port)) not in (0, errno.EINPROGRESS):
                    failed += 1
                    drop(stranger, now)
            elif stranger.connected and drips:
                stranger.next = now + AGAIN_S
                try:
                    stranger.sock.send(hello[stranger.sent : stranger.sent + 1])
                    stranger.sent = min(stranger.sent + 1, len(hello) - 2)
                except OSError:
                    closed += 1
                    drop(stranger, now)
        for fd, events in epoll.poll(0.02):
            if fd == 0:
                print(json.dumps({"opened": opened, "closed": closed, "failed": failed}), flush=True)
                return
            stranger = by_fd[fd]
            if not stranger.connected:
                if events & (select.EPOLLERR | select.EPOLLHUP):
                    failed += 1
                    drop(stranger, now)
                    continue
                stranger.connected = True
                opened += 1
                told += not stranger.ever
                stranger.ever = True
                stranger.next = now + (AGAIN_S if drips else 1e9)
                epoll.modify(fd, select.EPOLLIN)
                if told == count:
                    told += 1
                    print(json.dumps({"opened": count}), flush=True)
            else:  # nothing but an end is due from the listener
                closed += 1
                drop(stranger, now)


if __name__ == "__main__":
    raise_limit()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "drip")
