"""A link made slower in user space: `shape` puts a pipe between a link's owner and its connection.

The owner of the link gets one end of a socket pair, which it polls, reads, writes, shuts down and closes as it would
the connection; a thread holds the other end and the connection itself. What the owner sends goes through a `Pipe`
(delay, rate, losses: see there); what the peer sent was shaped at the peer, and is passed on as it comes. So each
end shapes what it sends, and a round trip takes twice the latency when both do.

`shape` may be called from any thread. One thread serves all shaped links of the process; it starts with the first and
ends with the last. Links that are not shaped never come here. Bytes are passed on unread: they are sealed.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import selectors
import socket
import sys
import threading
import time

from mlxcel_nb.cluster.shape import LinkShape
from mlxcel_nb.net.shaping.pipe import Pipe
from mlxcel_nb.util.log import get_logger, trail

log = get_logger("net.shaping")

SOCKET_BYTES = 256 << 10
"""Buffers of the socket pair, each way."""

READ_BYTES = 64 << 10

PIECES_PER_TURN = 8
"""Taken from one owner before other links get their turn."""

LINGER_S = 1.0
"""When the owner has closed and all it said has been delivered: for the peer to close too, beside the round trip."""

SWITCH_S = 0.5e-3
"""While links are shaped, a thread that computes lets this one run after so long; ordinarily it is 5 ms."""

SELECTABLE = 1024
"""Descriptors below this can be given to select()."""

EXIT_S = 3.0
"""For farewells to be delivered when the process ends."""


def shape(sock: socket.socket, how: LinkShape) -> socket.socket:
    """Take `sock` over, and return what its owner uses in its place from now on; it is non-blocking.

    `sock` itself is closed for the caller, as after `detach`.
    """
    ours, theirs = socket.socketpair()
    try:
        for end in (ours, theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        connection = socket.socket(fileno=sock.detach())
        connection.setblocking(False)
        try:
            _relays.take(_Relayed(connection, theirs, Pipe(how)))
        except BaseException:
            connection.close()
            raise
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return ours


def settle(within_s: float = EXIT_S) -> bool:
    """Wait until what owners sent before they closed has been delivered; for a process that is about to end.

    Returns:
        Whether it has.
    """
    return _relays.settle(within_s)


class _Relayed:
    """One shaped link: its connection, the inner end of its socket pair, and the pipe from this to that."""

    def __init__(self, connection: socket.socket, inner: socket.socket, pipe: Pipe) -> None:
        self.connection = connection
        self.inner = inner
        self.pipe = pipe
        self.closed = False
        self.ends_at = math.inf
        """When it is closed whatever the peer does."""
        self._watched = {connection: 0, inner: 0}
        self._pending = memoryview(b"")  # from the peer, not yet with the owner
        self._owner_ended = False  # the owner sends no more
        self._out_ended = False  # ... and the peer has been told
        self._in_ended = False  # the peer sends no more
        self._told = False  # ... and the owner has been told
        self._blocked = False  # the connection takes nothing now

    @property
    def due(self) -> float:
        """When there is something to do although no socket is ready."""
        return min(self.ends_at, math.inf if self._blocked else self.pipe.due)

    @property
    def saying_goodbye(self) -> bool:
        """Whether the owner has closed, and what it said is still on its way, or this may be so."""
        return (self._owner_ended or self.pipe.full) and not self._out_ended

    def move(self, ready: dict[socket.socket, int], now: float) -> None:
        """Do whatever can be done now."""
        if ready.get(self.inner, 0) & selectors.EVENT_READ:
            self._from_owner(now)
        if ready.get(self.connection, 0) & selectors.EVENT_WRITE:
            self._blocked = False
        self._deliver(now)
        if ready.get(self.inner, 0) & selectors.EVENT_WRITE:
            self._to_owner()
        if ready.get(self.connection, 0) & selectors.EVENT_READ:
            self._from_peer()
        if (self._out_ended and self._told) or now >= self.ends_at:
            self.closed = True

    def wants(self) -> dict[socket.socket, int]:
        """The events each socket is to be watched for."""
        read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
        return {
            self.inner: (0 if self._owner_ended or self.pipe.full else read) | (write if self._pending else 0),
            self.connection: (0 if self._in_ended or self._pending else read) | (write if self._blocked else 0),
        }

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Bring `selector` up to date."""
        for sock, events in ({self.inner: 0, self.connection: 0} if self.closed else self.wants()).items():
            before = self._watched[sock]
            if events == before:
                continue
            if not events:
                selector.unregister(sock)
            elif before:
                selector.modify(sock, events, self)
            else:
                selector.register(sock, events, self)
            self._watched[sock] = events

    def close(self) -> None:
        self.closed = True
        self.inner.close()
        self.connection.close()

    # -- from the owner to the peer ---------------------------------------------------------------

    def _from_owner(self, now: float) -> None:
        for _ in range(PIECES_PER_TURN):
            if self.pipe.full:
                return
            try:
                data = self.inner.recv(self.pipe.piece_bytes)
            except BlockingIOError:
                return
            except OSError:  # closed with something unread
                data = b""
            self.pipe.put(now, data)
            if not data:
                self._owner_ended = True
                return

    def _deliver(self, now: float) -> None:
        """Send what has arrived by now."""
        pipe = self.pipe
        while not self._blocked and pipe.due <= now:
            data = pipe.head()
            if not data:
                self._end_out()
                self.ends_at = now + 2 * pipe.latency_s + LINGER_S
                return
            try:
                pipe.took(self.connection.send(data))
            except BlockingIOError:
                self._blocked = True
            except OSError:
                # The peer takes no more; what it said last may still be read, and the end will be read behind it.
                self._refuse()

    def _refuse(self) -> None:
        """The connection takes nothing more: neither does the owner's socket."""
        self._end_out()
        with contextlib.suppress(OSError):
            self.inner.shutdown(socket.SHUT_RD)

    def _end_out(self) -> None:
        self.pipe.clear()
        self._blocked = False
        self._owner_ended = self._out_ended = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    # -- from the peer to the owner ---------------------------------------------------------------

    def _from_peer(self) -> None:
        try:
            data = self.connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a reset: what is on its way is lost with the connection
            data = b""
            self._refuse()
        if data:
            self._pending = memoryview(data)
        else:
            self._in_ended = True
        self._to_owner()

    def _to_owner(self) -> None:
        while self._pending:
            try:
                self._pending = self._pending[self.inner.send(self._pending) :]
            except BlockingIOError:
                return
            except OSError:  # the owner is gone: nobody wants it
                self._pending = memoryview(b"")
        if self._in_ended and not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                self.inner.shutdown(socket.SHUT_WR)


class _Relays:
    """All shaped links of the process, and the thread that moves their bytes while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waker: socket.socket | None = None
        self._fresh: list[_Relayed] = []
        self._settlers: list[threading.Event] = []

    def take(self, link: _Relayed) -> None:
        """Serve `link` until its end."""
        with self._lock:
            if self._waker is None:
                woken, waker = socket.socketpair()
                thread = threading.Thread(target=self._run, args=(woken,), name="shaped-links", daemon=True)
                try:
                    thread.start()
                except BaseException:
                    woken.close()
                    waker.close()
                    raise
                self._waker = waker
            self._fresh.append(link)
            self._waker.send(b"!")

    def settle(self, within_s: float) -> bool:
        done = threading.Event()
        with self._lock:
            if self._waker is None:
                return True
            self._settlers.append(done)
            self._waker.send(b"!")
        return done.wait(within_s)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self, woken: socket.socket) -> None:
        links: set[_Relayed] = set()
        switching = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        with woken, selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            while self._goes_on(links, selector):
                due = min((link.due for link in links), default=math.inf)
                ready: dict[_Relayed, dict[socket.socket, int]] = {}
                for key, events in _wait(selector, due):
                    if key.data is None:
                        woken.recv(4096)
                    else:
                        ready.setdefault(key.data, {})[key.fileobj] = events  # type: ignore[index]
                now = time.monotonic()
                for link in list(links):
                    if link in ready or link.due <= now:
                        self._move(link, ready.get(link, {}), now, selector)
                links = {link for link in links if not link.closed}
        sys.setswitchinterval(switching)

    def _move(
        self, link: _Relayed, ready: dict[socket.socket, int], now: float, selector: selectors.BaseSelector
    ) -> None:
        try:
            link.move(ready, now)
        except Exception as error:  # noqa: BLE001  # one link's fault is not the others'
            log.error("a shaped link ended: %s", trail(error))
            link.closed = True
        link.watch(selector)
        if link.closed:
            link.close()

    def _goes_on(self, links: set[_Relayed], selector: selectors.BaseSelector) -> bool:
        """Take in what has come, answer who waits, and say whether there is anything left to serve."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            for link in fresh:
                link.watch(selector)
            links.update(fresh)
            if self._settlers and not any(link.saying_goodbye for link in links) and not selector.select(0):
                for settler in self._settlers:
                    settler.set()
                self._settlers = []
            if links:
                return True
            assert self._waker is not None
            for settler in self._settlers:
                settler.set()
            self._settlers = []
            self._waker.close()
            self._waker = None
            return False


def _wait(selector: selectors.BaseSelector, due: float) -> list[tuple[selectors.SelectorKey, int]]:
    """What is ready, at `due` at the latest; epoll alone would round the time up to a millisecond."""
    if due == math.inf:
        return selector.select()
    left = max(0.0, due - time.monotonic())
    epoll = getattr(selectors, "EpollSelector", None)
    if left and epoll and isinstance(selector, epoll) and selector.fileno() < SELECTABLE:
        select.select([selector.fileno()], [], [], left)
        left = 0.0
    return selector.select(left)


_relays = _Relays()
atexit.register(settle)


def _forget() -> None:
    """In a forked child, which has no such thread: the links are its parent's."""
    global _relays
    _relays = _Relays()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
