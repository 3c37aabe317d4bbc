"""Tensors and caches that are put together from pieces in any order, against a model of what must come of it."""

from __future__ import annotations

import collections

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxcel_nb.errors import WireError
from mlxcel_nb.wire import kv
from mlxcel_nb.wire.kv import ArraySpec, Counts, Layout, Range, Transfer
from mlxcel_nb.wire.kv_assembler import Complete, KVAssembler
from mlxcel_nb.wire.kv_sender import KVSender
from mlxcel_nb.wire.tensors import Assembler, encode, payloads
from tests.fuzz.arrays import add, stray


class Tensors(RuleBasedStateMachine):
    """Several tensors on several channels, each piece the next of its own; now and then one that is not."""

    @initialize()
    def begin(self) -> None:
        self.assembler = Assembler(limit=1 << 16, place=lambda _, size: memoryview(bytearray(size)))
        self.flying: dict[tuple[int, int], collections.deque[bytes]] = {}
        self.content: dict[tuple[int, int], bytes] = {}
        self.over = False

    @rule(
        channel=st.integers(0, 1), number=st.integers(0, 3), size=st.integers(0, 4000), lz4=st.booleans(),
        part=st.integers(512, 900),
    )  # fmt: skip
    def send(self, channel: int, number: int, size: int, lz4: bool, part: int) -> None:
        key = (channel, number)
        if key in self.flying or self.over:
            return
        data = (b"%d.%d " % key * 1000)[: size // 2 * 2]
        parts = encode("int16", (len(data) // 2,), f"{channel}.{number}.0", data, compress_lz4=lz4)
        self.flying[key] = collections.deque(b"".join(map(bytes, p)) for p in payloads(parts, number, part_bytes=part))
        self.content[key] = data

    @rule(size=st.integers(0, 2000))
    def stray(self, size: int) -> None:
        """A frame of another kind lands where a piece was due, and leaves no trace."""
        if not self.over:
            stray(self.assembler, size)

    @rule(which=st.integers(0, 100), harm=st.sampled_from(["", "", "", "", "", "", "skip", "twice", "elsewhere"]))
    @precondition(lambda self: bool(self.flying) and not self.over)
    def deliver(self, which: int, harm: str) -> None:
        key = sorted(self.flying)[which % len(self.flying)]
        pieces = self.flying[key]
        begun = key in self.assembler._open
        if harm and begun and len(pieces) >= 2:
            bad = pieces[1] if harm == "skip" else pieces[0]
            self.over = True
            with pytest.raises(WireError):
                if harm == "twice":
                    self.assembler.add(key[0], memoryview(bad))
                self.assembler.add(key[0] + 8 * (harm == "elsewhere"), memoryview(bad))
            return
        done = add(self.assembler, key[0], pieces.popleft())
        assert (done is not None) == (not pieces)
        if done is not None:
            header, data = done
            assert header.name == f"{key[0]}.{key[1]}.0" and bytes(data) == self.content[key]
            del self.flying[key]

    @invariant()
    def only_what_has_begun_is_kept(self) -> None:
        assert len(self.assembler._open) <= len(self.flying)


SPEC = ArraySpec("int16", 1, (2, 6, 3))


class Caches(RuleBasedStateMachine):
    """Two transfers of two layers; every slot of every array is sent once, in some order, or something is wrong."""

    @initialize()
    def begin(self) -> None:
        self.receiver = KVAssembler(model=bytes(32), layers=range(2), limit=4 * SPEC.nbytes * 2)
        self.senders: dict[int, KVSender] = {}
        self.covered: dict[tuple[int, int, int], list[bool]] = {}
        self.ended: set[int] = set()
        self.done: set[int] = set()
        self.over = False

    def _add(self, message: bytes, *, bad: bool = False) -> None:
        if bad:
            self.over = True
            with pytest.raises(WireError):
                self.receiver.add(memoryview(message))
            return
        event = self.receiver.add(memoryview(message))
        if event is None:
            return
        assert isinstance(event, Complete)
        number = event.transfer.number
        assert number in self.ended and self._whole(number)
        for layer, arrived in event.layers.items():
            for array, data in enumerate(arrived.arrays):
                assert bytes(data) == _content(number, layer, array)
        assert self.senders[number].heard(memoryview(event.ack)) and self.senders[number].acknowledged
        self.done.add(number)

    def _whole(self, number: int) -> bool:
        keys = [(number, layer, array) for layer in range(2) for array in range(2)]
        return all(key in self.covered and all(self.covered[key]) for key in keys)

    @rule(number=st.integers(0, 1))
    def open(self, number: int) -> None:
        if self.over:
            return
        own = Transfer(
            request=f"r{number}", model=bytes(32), epoch=0, number=number, heads=Range(0, 2), tokens=Range(0, 6),
            layout=Layout.PLAIN, dtype="int16",
        )  # fmt: skip
        sender = KVSender(own, [0, 1], 4 * SPEC.nbytes)
        known = number in self.senders
        if number not in self.done:
            self._add(sender.begin(), bad=known)
        if not known:
            self.senders[number] = sender

    @rule(number=st.integers(0, 1), layer=st.integers(0, 1))
    @precondition(lambda self: not self.over)
    def describe(self, number: int, layer: int) -> None:
        if number not in self.senders or number in self.done:
            return
        message = self.senders[number].layer(layer, Layout.PLAIN, "int16", (SPEC, SPEC))
        self._add(message, bad=(number, layer, 0) in self.covered)
        for array in range(2):
            self.covered[number, layer, array] = [False] * 6

    @rule(number=st.integers(0, 1), layer=st.integers(0, 1), array=st.integers(0, 1), at=st.integers(0, 5),
          size=st.integers(1, 6), again=st.booleans())  # fmt: skip
    @precondition(lambda self: not self.over)
    def fill(self, number: int, layer: int, array: int, at: int, size: int, again: bool) -> None:
        covered = self.covered.get((number, layer, array))
        if covered is None or number in self.done:
            return
        slots = Range(at, min(6, at + size))
        twice = any(covered[slots.begin : slots.end])
        if twice and not again:
            return
        sender = self.senders[number]
        data = _slots(_content(number, layer, array), slots)
        before = sender.sent
        (parts,) = sender.pieces(layer, array, data, begin=slots.begin)
        if twice:
            sender.sent = before
        else:
            covered[slots.begin : slots.end] = [True] * slots.size
        self._add(b"".join(map(bytes, parts)), bad=twice)

    @rule(number=st.integers(0, 1), lie=st.integers(0, 9))
    @precondition(lambda self: not self.over)
    def end(self, number: int, lie: int) -> None:
        if number not in self.senders or number in self.ended | self.done:
            return
        sender = self.senders[number]
        if not self._whole(number):
            if lie == 0:
                self._add(sender.end(), bad=True)
            return
        self.ended.add(number)
        if lie == 1:
            self._add(kv.encode_end(sender.transfer, Counts(sender.sent.pieces + 1, sender.sent.nbytes)), bad=True)
        else:
            self._add(sender.end())

    @invariant()
    def memory_is_what_was_reserved(self) -> None:
        assert self.receiver.allocated <= self.receiver.reserved <= 4 * SPEC.nbytes * 2


def _content(number: int, layer: int, array: int) -> bytes:
    return bytes((number * 97 + layer * 31 + array * 7 + i) % 256 for i in range(SPEC.nbytes))


def _slots(data: bytes, slots: Range) -> bytes:
    row = 6 * 3 * 2
    return b"".join(data[head * row + slots.begin * 6 : head * row + slots.end * 6] for head in range(2))


Tensors.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
Caches.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestTensors = Tensors.TestCase
TestCaches = Caches.TestCase
