"""`python -m benchmarks.sides.attacker HOST PORT COUNT silent|drip`: strangers who hold on to a port.

Keeps COUNT connections open: one that the listener closes is opened again within two seconds. They send nothing, or the
bytes of a good ClientHello, one a second. Says `{"opened": COUNT}` once every one has been open, and ends, with what
it counted, at a line on standard input.
"""

from __future__ import annotations

import math
import random
import selectors
import socket
import sys
import time

from benchmarks.sides.guarded import CLUSTER, raise_limit, say
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


class Flood:
    """All of them, on one thread."""

    def __init__(self, host: str, port: int, count: int, *, drips: bool) -> None:
        self.counts = {"opened": 0, "closed": 0, "failed": 0}
        self._target = (host, port)
        self._drips = drips
        self._strangers = [Stranger() for _ in range(count)]
        self._missing = count
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        me = Identity(cluster=CLUSTER, node_id="stranger", role="worker", incarnation=new_incarnation())
        self._hello = ClientHandshake(me, Secret(bytes(32))).data_to_send()

    def run(self) -> None:
        """Until there is something on standard input."""
        while True:
            now = time.monotonic()
            for stranger in self._strangers:
                if stranger.next <= now:
                    self._act(stranger, now)
            for key, _ in self._selector.select(0.02):
                if key.data is None:
                    return
                self._heed(key.data, now)

    def _act(self, stranger: Stranger, now: float) -> None:
        """Connect, or send the next byte."""
        if stranger.sock is None:
            stranger.sock = socket.socket()
            stranger.sock.setblocking(False)
            stranger.next = math.inf
            self._selector.register(stranger.sock, selectors.EVENT_WRITE, stranger)
            stranger.sock.connect_ex(self._target)
            return
        stranger.next = now + AGAIN_S
        try:
            stranger.sock.send(self._hello[stranger.sent : stranger.sent + 1])
            stranger.sent = min(stranger.sent + 1, len(self._hello) - 2)  # its last byte never comes
        except OSError:
            self._drop(stranger, now, "closed")

    def _heed(self, stranger: Stranger, now: float) -> None:
        """It is connected, could not connect, or was ended: nothing else is due from the listener."""
        assert stranger.sock is not None
        if stranger.connected:
            self._drop(stranger, now, "closed")
        elif stranger.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._drop(stranger, now, "failed")
        else:
            stranger.connected = True
            stranger.next = now + AGAIN_S if self._drips else math.inf
            self._selector.modify(stranger.sock, selectors.EVENT_READ, stranger)
            self.counts["opened"] += 1
            self._missing -= not stranger.ever
            if not self._missing and not stranger.ever:
                say(opened=len(self._strangers))
            stranger.ever = True

    def _drop(self, stranger: Stranger, now: float, how: str) -> None:
        assert stranger.sock is not None
        self.counts[how] += 1
        self._selector.unregister(stranger.sock)
        stranger.sock.close()
        stranger.sock, stranger.connected, stranger.sent = None, False, 0
        stranger.next = now + 2 * AGAIN_S * random.random()


if __name__ == "__main__":
    raise_limit()
    flood = Flood(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), drips=sys.argv[4] == "drip")
    flood.run()
    say(**flood.counts)
