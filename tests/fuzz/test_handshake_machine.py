"""Handshakes over a hostile network: bytes are split, bent, left out, doubled and swapped, at any moment."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxcel_nb.errors import HandshakeError
from mlxcel_nb.wire.handshake import ClientHandshake, ServerHandshake, State
from mlxcel_nb.wire.hello import MAX_MESSAGE
from tests.fuzz.handshakes import CLIENT, SECRET, SERVER

OVER = {State.ESTABLISHED, State.FAILED}


class Way:
    """One direction of the wire: what was put on it, what is on its way, what came out."""

    def __init__(self) -> None:
        self.sent = b""
        self.flying = bytearray()
        self.came = b""

    def put(self, data: bytes) -> None:
        self.sent += data
        self.flying += data

    def take(self, count: int) -> bytes:
        taken = bytes(self.flying[:count])
        del self.flying[:count]
        self.came += taken
        return taken


class Handshakes(RuleBasedStateMachine):
    @initialize(old=st.booleans())
    def begin(self, old: bool) -> None:
        self.client = ClientHandshake(CLIENT, SECRET, expect_node_id="node-b")
        self.server = ServerHandshake(SERVER, [b"another secret of the cluster", SECRET] if old else [SECRET])
        self.ways = {self.client: Way(), self.server: Way()}
        self.verdict = 0
        self._collect()

    def _collect(self) -> None:
        for end, way in self.ways.items():
            way.put(end.data_to_send())

    @rule(to_server=st.booleans(), count=st.one_of(st.integers(1, 40), st.just(2000)))
    def deliver(self, to_server: bool, count: int) -> None:
        source, target = (self.client, self.server) if to_server else (self.server, self.client)
        way = self.ways[source]
        if target.state in OVER or not way.flying:
            return
        try:
            target.receive_data(way.take(min(count, target.room)))
        except HandshakeError:
            assert target.state is State.FAILED
        self._collect()

    @rule(code=st.sampled_from([0, 0, 0, 1, 2, 3]))
    @precondition(lambda self: self.server.state is State.AWAITING_VERDICT)
    def decide(self, code: int) -> None:
        self.verdict = code
        self.server.verdict(code, "so it is")
        self._collect()

    @rule(way=st.booleans(), at=st.integers(0, 10**6), bit=st.integers(0, 7))
    def flip(self, way: bool, at: int, bit: int) -> None:
        flying = self.ways[self.client if way else self.server].flying
        if flying:
            flying[at % len(flying)] ^= 1 << bit

    @rule(way=st.booleans(), at=st.integers(0, 10**6), size=st.integers(1, 80), how=st.integers(0, 2))
    def shift(self, way: bool, at: int, size: int, how: int) -> None:
        """Leave a stretch out, double it, or move it to the front."""
        flying = self.ways[self.client if way else self.server].flying
        at %= len(flying) + 1
        stretch = bytes(flying[at : at + size])
        if how != 1:
            del flying[at : at + size]
        if how:
            flying[:0] = stretch

    @rule(way=st.booleans(), data=st.binary(min_size=1, max_size=60))
    def inject(self, way: bool, data: bytes) -> None:
        self.ways[self.client if way else self.server].flying[:0] = data

    @rule(server=st.booleans())
    def hang_up(self, server: bool) -> None:
        end = self.server if server else self.client
        if end.state not in OVER:
            try:
                end.receive_eof()
            except HandshakeError:
                return
            raise AssertionError("an end in the middle is an error")

    @invariant()
    def nobody_keeps_much(self) -> None:
        for end in (self.client, self.server):
            assert len(end._buffer) <= MAX_MESSAGE and 0 <= end.room <= MAX_MESSAGE

    @invariant()
    def who_is_in_heard_what_was_said(self) -> None:
        """The server lets in only a client that answered its very words; the client knows that of the server too."""
        client, server = self.ways[self.client], self.ways[self.server]
        if self.server.established is not None or self.server.state is State.AWAITING_VERDICT:
            assert client.sent.startswith(client.came)
        if self.client.established is not None:
            assert self.verdict == 0 and self.server.established is not None
            assert server.came[: len(server.sent)] == server.sent
            assert self.client.established.send == self.server.established.receive
            assert self.client.established.receive == self.server.established.send


class HonestNetwork(Handshakes):
    """The same without harm: both ends get there, however the bytes are cut."""

    def flip(self, way: bool, at: int, bit: int) -> None:
        del way, at, bit

    def shift(self, way: bool, at: int, size: int, how: int) -> None:
        del way, at, size, how

    def inject(self, way: bool, data: bytes) -> None:
        del way, data

    def hang_up(self, server: bool) -> None:
        del server

    def teardown(self) -> None:
        if not hasattr(self, "client"):
            return
        for _ in range(2000):
            if self.client.state in OVER:
                break
            self.deliver(True, 37)
            if self.server.state is State.AWAITING_VERDICT:
                self.decide(0)
            self.deliver(False, 41)
        assert self.client.state is (State.ESTABLISHED if self.verdict == 0 else State.FAILED)


Handshakes.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
HonestNetwork.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestHandshakes = Handshakes.TestCase
TestHonestNetwork = HonestNetwork.TestCase
