"""The second implementation's sockets: one blocking connection, client or server, honest unless a test bends it.

`alter` sees every message and frame before it is sent, by name ("ClientHello", "Verdict", "ping" ...), and returns the
bytes that go out; the transcripts are kept over what was really sent, so that a bent field is refused for itself and
not for a tag that no longer fits.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import msgpack
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from tests.peer import codec
from tests.peer.codec import Broken, Direction, Hello, message

WAIT_S = 20.0
"""No test waits longer for a byte; generous, for a loaded machine."""

NAMES = {1: "ClientHello", 2: "ServerHello", 3: "ClientProof", 4: "Verdict", 5: "Reject"}
KINDS = ("close", "ping", "pong", "control", "tensor", "kv", "stream", "credit", "rekey")


class Ended(Exception):
    """The stream ended; `within` says whether that was in the middle of something."""

    def __init__(self, within: bool) -> None:
        super().__init__("the other side ended the stream" + (" in the middle" if within else ""))
        self.within = within


class Rejected(Exception):
    """A Reject came."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"Reject {code}: {detail}")
        self.code, self.detail = code, detail


class Refused(Exception):
    """An authentic verdict above 0 came."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"verdict {code}: {detail}")
        self.code, self.detail = code, detail


class Frame(NamedTuple):
    kind: int
    channel: int
    payload: bytes


Alter = Callable[[str, bytes], bytes]


class Peer:
    """One end of a connection. The handshake's steps are methods of their own, so that a test can stop between them."""

    def __init__(
        self,
        sock: socket.socket,
        secret: bytes,
        *,
        older: bytes | None = None,
        alter: Alter | None = None,
        rekey_every: int = 0,
        **fields: Any,
    ) -> None:
        self.sock, self.secrets = sock, [secret, *([older] if older else [])]
        self.secret = secret
        self.private = X25519PrivateKey.generate()
        self.hello = Hello(**{"x25519": codec.public_bytes(self.private)} | fields)
        self.other: Hello | None = None
        self.alter: Alter = alter or (lambda _name, data: data)
        self.rekey_every = rekey_every
        self.sent: dict[int, bytes] = {}
        self.buffer = b""
        self.out: Direction | None = None
        self.into: Direction | None = None
        self.credit: dict[int, int] = defaultdict(lambda: 64)
        self.unanswered: list[bytes] = []
        sock.settimeout(WAIT_S)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def dial(cls, address: tuple[str, int], secret: bytes, **options: Any) -> Self:
        """A connection on which nothing has been said yet."""
        return cls(socket.create_connection(address, WAIT_S), secret, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    # ------------------------------------------------------------------------------------------------- bytes

    def write(self, data: bytes) -> None:
        self.sock.sendall(data)

    def read(self, size: int, *, begun: bool = False) -> bytes:
        while len(self.buffer) < size:
            try:
                got = self.sock.recv(1 << 18)
            except ConnectionResetError as reset:
                raise Ended(bool(self.buffer) or begun) from reset
            if not got:
                raise Ended(bool(self.buffer) or begun)
            self.buffer += got
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def peek(self, size: int) -> bytes:
        """What `read` will return, left where it is."""
        data = self.read(size)
        self.buffer = data + self.buffer
        return data

    def finish(self) -> None:
        """No more will be sent; the stream ends without a word."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    # --------------------------------------------------------------------------------------------- handshake

    def say(self, kind: int, body: bytes, **header: Any) -> None:
        self.sent[kind] = self.alter(NAMES.get(kind, "?"), message(kind, body, **header))
        self.write(self.sent[kind])

    def hear(self, kind: int) -> bytes:
        """The body of the next message, which must be of this kind."""
        head = self.read(9)
        magic, (version, got, length) = head[:4], struct.unpack(">HBH", head[4:])
        if magic != codec.MAGIC or length > codec.MAX_BODY:
            raise Broken(f"the header {head.hex()}")
        body = self.read(length, begun=True)
        self.sent[got] = head + body
        if got == codec.REJECT:
            take = codec.Fields(body)
            code, detail = take.integer(1), take.str8()
            take.end()
            raise Rejected(code, detail)
        if version != codec.VERSION or got != kind:
            raise Broken(f"version {version}, type {got} in place of {kind}")
        return body

    def said(self, *kinds: int) -> bytes:
        """Messages as they travelled, in a row."""
        return b"".join(self.sent[kind] for kind in kinds)

    def say_client_hello(self) -> None:
        self.say(codec.CLIENT_HELLO, self.hello.body())

    def hear_server_hello(self) -> Hello:
        self.other = Hello.read(self.hear(codec.SERVER_HELLO))
        self._check_other()
        return self.other

    def say_client_proof(self) -> None:
        self.say(codec.CLIENT_PROOF, codec.proof_tag(self.secret, self.sent[1], self.sent[2]))

    def hear_verdict(self) -> None:
        take = codec.Fields(self.hear(codec.VERDICT))
        code, detail, tag = take.integer(1), take.str8(), take.take(32)
        take.end()
        if not hmac.compare_digest(codec.verdict_tag(self.secret, self._t2(), code, detail.encode()), tag):
            raise Broken("the verdict's tag")
        if code:
            raise Refused(code, detail)
        self._make_keys(client=True)

    def hear_client_hello(self) -> Hello:
        self.other = Hello.read(self.hear(codec.CLIENT_HELLO))
        self._check_other()
        return self.other

    def say_server_hello(self) -> None:
        self.say(codec.SERVER_HELLO, self.hello.body())

    def hear_client_proof(self) -> None:
        body = self.hear(codec.CLIENT_PROOF)
        for secret in self.secrets:
            if hmac.compare_digest(codec.proof_tag(secret, self.sent[1], self.sent[2]), body):
                self.secret = secret
                return
        raise Broken("the proof's tag")

    def say_verdict(self, code: int = 0, detail: bytes = b"") -> None:
        if self.buffer:
            raise Broken("bytes after ClientProof")
        tag = codec.verdict_tag(self.secret, self._t2(), code, detail)
        self.say(codec.VERDICT, bytes([code]) + codec.str8(detail) + tag)
        if not code:
            self._make_keys(client=False)

    def reject(self, code: int, detail: str = "") -> None:
        self.say(codec.REJECT, bytes([code]) + codec.str8(detail))

    def be_client(self, *, greet: bool = True) -> Self:
        self.say_client_hello()
        self.hear_server_hello()
        self.say_client_proof()
        self.hear_verdict()
        return self.greet() if greet else self

    def be_server(self, *, greet: bool = True) -> Self:
        self.hear_client_hello()
        self.say_server_hello()
        self.hear_client_proof()
        self.say_verdict()
        return self.greet() if greet else self

    def _check_other(self) -> None:
        assert self.other is not None
        if self.other.suite != self.hello.suite or self.other.cluster != self.hello.cluster:
            raise Broken(f"suite {self.other.suite}, cluster {self.other.cluster!r}")
        if self.other.incarnation == self.hello.incarnation or self.other.x25519 == self.hello.x25519:
            raise Broken("myself")

    def _t2(self) -> bytes:
        return hashlib.sha256(self.said(1, 2, 3)).digest()

    def _make_keys(self, *, client: bool) -> None:
        assert self.other is not None
        c2s, s2c = codec.connection_keys(self.hello.suite, self.private, self.other.x25519, self.secret, self._t2())
        self.out, self.into = (c2s, s2c) if client else (s2c, c2s)

    # ------------------------------------------------------------------------------------------------ frames

    def greet(self, first: dict[str, Any] | None = None) -> Self:
        """Sends the first control frame and takes the other side's."""
        self.send(codec.CONTROL, 0, msgpack.packb(first or {"schema": 1, "features": [], "versions": {}}))
        frame = self.next_frame()
        told = msgpack.unpackb(frame.payload) if frame.kind == codec.CONTROL else None
        if frame.channel or not isinstance(told, dict) or told.get("schema") != 1:
            raise Broken(f"the first frame is {frame}")
        if not {"features", "versions"} <= told.keys():
            raise Broken(f"the first frame has only {sorted(told)}")
        return self

    def send(self, kind: int, channel: int = 0, payload: bytes = b"") -> None:
        """One frame, and a rekey behind it when one is due."""
        assert self.out is not None
        if kind in codec.COUNTED:
            if not self.credit[channel]:
                raise Broken(f"no credit left on channel {channel}")
            self.credit[channel] -= 1
        self.write(self.alter(KINDS[kind], self.out.seal(kind, channel, payload)))
        if self.rekey_every and self.out.number >= self.rekey_every and kind != codec.CLOSE:  # that was the last one
            self.rekey()

    def rekey(self) -> None:
        assert self.out is not None
        self.write(self.alter("rekey", self.out.seal(codec.REKEY)))
        self.out.rekey()

    def next_frame(self) -> Frame:
        """The next frame that is not a rekey or a credit, both of which are taken in here."""
        assert self.into is not None
        while True:
            head = self.read(4)
            length = int.from_bytes(head, "big")
            if not codec.MIN_FRAME <= length <= codec.MAX_FRAME:
                raise Broken(f"a frame of {length} bytes")
            frame = Frame(*self.into.open(head + self.read(length, begun=True)))
            if self.into.number > 1 << 20:
                raise Broken("more frames than one key is for")
            if frame.kind == codec.REKEY:
                if frame.payload:
                    raise Broken("a rekey with a payload")
                self.into.rekey()
            elif frame.kind == codec.CREDIT:
                if len(frame.payload) != 4:
                    raise Broken("a credit of another size")
                self.credit[frame.channel] += int.from_bytes(frame.payload, "big")
            elif frame.kind > codec.REKEY:
                raise Broken(f"a frame of kind {frame.kind}")
            else:
                return frame

    def frames(self) -> Iterator[Frame]:
        """Frames that are no pings; pings are answered on the way. Ends with the close frame, which is given too."""
        while True:
            frame = self.next_frame()
            if frame.kind == codec.PING:
                if len(frame.payload) < 8 or len(frame.payload) > 8 + (1 << 20):
                    raise Broken(f"a ping of {len(frame.payload)} bytes")
                with contextlib.suppress(ConnectionError):  # it has left: its last words are still to be read
                    self.send(codec.PONG, frame.channel, frame.payload)
                continue
            yield frame
            if frame.kind == codec.CLOSE:
                return

    def ping(self, filler: bytes = b"", *, mark: bytes | None = None) -> None:
        """Sends a ping without waiting."""
        payload = (mark or struct.pack(">Q", len(self.unanswered))) + filler
        self.unanswered.append(payload)
        self.send(codec.PING, 0, payload)

    def pong(self) -> None:
        """Waits for the answer to the oldest ping."""
        for frame in self.frames():
            if frame.kind == codec.PONG:
                if not self.unanswered or frame.payload != self.unanswered.pop(0):
                    raise Broken("a pong that is no echo")
                return
            if frame.kind == codec.CLOSE:
                raise Broken(f"closed: {frame.payload[1:].decode()}")
        raise Broken("no pong")

    def close(self, reason: str = "") -> str:
        """Says goodbye and returns the other side's last words."""
        self.farewell(reason)
        return self.last_words()

    def farewell(self, reason: str = "") -> None:
        """The last frame of this side; whoever said goodbye first may be gone already."""
        with contextlib.suppress(ConnectionError):
            self.send(codec.CLOSE, 0, codec.str8(reason))
        self.finish()

    def last_words(self) -> str:
        """Reason of the close frame that comes next, pings and others aside, after which the stream must end."""
        for frame in self.frames():
            if frame.kind == codec.CLOSE:
                take = codec.Fields(frame.payload)
                reason = take.str8()
                take.end()
                with contextlib.suppress(Ended):
                    self.read(1)
                    raise Broken("bytes behind the close frame")
                return reason
        raise Broken("no close frame")
