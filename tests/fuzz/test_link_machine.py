"""A link's two ends: frames of every kind, credits and rekeys on a wire that cuts bytes anywhere, and may bend one."""

from __future__ import annotations

import collections

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxcel_nb.errors import FrameError
from mlxcel_nb.wire.credits import INITIAL, ReceiveCredits, SendCredits
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import Kind, Opener, Sealer, credit_count
from tests.fuzz.streams import FIRST

COUNTED = {Kind.TENSOR, Kind.KV, Kind.STREAM}
WINDOW = 8


class Link(RuleBasedStateMachine):
    """One direction carries frames, the other its credits; the window is small, so that it is used up often."""

    @initialize(suite=st.sampled_from([1, 2]), rekey_every=st.sampled_from([1, 2, 5, None]))
    def begin(self, suite: int, rekey_every: int | None) -> None:
        self.sealer = Sealer(FIRST, suite, rekey_every=rekey_every)
        self.reader = FrameReader(Opener(FIRST, suite))
        self.back, self.reply = FrameReader(Opener(FIRST.next(), suite)), Sealer(FIRST.next(), suite, rekey_every=3)
        self.may_send, self.credits = SendCredits(), ReceiveCredits(WINDOW)
        self.wire = bytearray()
        self.due: collections.deque[tuple[Kind, int, bytes]] = collections.deque()
        self.unread: collections.deque[int] = collections.deque()
        self.in_flight: collections.Counter[int] = collections.Counter()
        self.bent_at: int | None = None
        self.fed = self.sent = 0
        self.failed = False

    @rule(kind=st.sampled_from(list(Kind)[1:7]), channel=st.integers(0, 3), size=st.integers(0, 3000))
    @precondition(lambda self: not self.failed)
    def send(self, kind: Kind, channel: int, size: int) -> None:
        payload = bytes((kind * 16 + channel,)) * (max(8, size) if kind in {Kind.PING, Kind.PONG} else size)
        if kind in COUNTED:
            if not self.may_send.spend(channel):
                assert self.in_flight[channel] + self._ungranted(channel) >= INITIAL - WINDOW
                return
            self.in_flight[channel] += 1
        sealed = bytes(self.sealer.seal(kind, channel, payload))
        self.wire += sealed
        self.sent += len(sealed)
        self.due.append((kind, channel, payload))

    def _ungranted(self, channel: int) -> int:
        return self.unread.count(channel) + self.credits._taken.get(channel, 0)

    @rule(count=st.one_of(st.integers(1, 60), st.integers(1, 20_000)))
    def deliver(self, count: int) -> None:
        if self.failed:
            return
        piece = bytes(self.wire[:count])
        del self.wire[:count]
        self.reader.feed(piece)
        self.fed += len(piece)
        harmed = self.bent_at is not None and self.bent_at < self.fed
        try:
            for frame in self.reader.frames():
                kind, channel, payload = self.due.popleft()
                assert (frame.kind, frame.channel, bytes(frame.payload)) == (kind, channel, payload)
                if kind in COUNTED:
                    self.credits.received(channel)
                    self.in_flight[channel] -= 1
                    self.unread.append(channel)
        except FrameError:
            assert harmed
            self.failed = True
            self.reader.feed(bytes(64))
            with pytest.raises(FrameError):
                self.reader.next_frame()

    @rule()
    @precondition(lambda self: bool(self.unread))
    def read(self) -> None:
        channel = self.unread.popleft()
        if granted := self.credits.taken(channel):
            self.back.feed(self.reply.seal(Kind.CREDIT, channel, granted.to_bytes(4, "big")))
            (frame,) = self.back.frames()
            self.may_send.grant(frame.channel, credit_count(frame.payload))

    @rule(at=st.integers(0, 10**6), bit=st.integers(0, 7))
    @precondition(lambda self: self.bent_at is None and bool(self.wire))
    def bend(self, at: int, bit: int) -> None:
        at %= len(self.wire)
        self.wire[at] ^= 1 << bit
        self.bent_at = self.fed + at

    @invariant()
    def what_waits_is_bounded(self) -> None:
        for channel in range(4):
            assert self.in_flight[channel] + self.unread.count(channel) <= INITIAL
        assert len(self.reader._buffer) <= max(1 << 16, 4 * self.fed)


class SoundLink(Link):
    """The same, and no byte is bent: whatever is sent arrives."""

    def bend(self, at: int, bit: int) -> None:
        del at, bit

    def teardown(self) -> None:
        if hasattr(self, "wire"):
            self.deliver(len(self.wire))
            assert not self.due and not self.failed


Link.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
SoundLink.TestCase.settings = settings(max_examples=40, stateful_step_count=60)
TestLink = Link.TestCase
TestSoundLink = SoundLink.TestCase
