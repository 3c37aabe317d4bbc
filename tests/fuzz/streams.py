"""Frames of a member that may say anything, and what a link does with them."""

from __future__ import annotations

import contextlib
import functools

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.wire import messages
from mlxcel_nb.wire.credits import INITIAL, ReceiveCredits, SendCredits
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import MAX_FRAMES, Frame, Kind, Opener, close_reason, credit_count
from mlxcel_nb.wire.keys import DirectionKeys
from mlxcel_nb.wire.tensors import Assembler
from tests.fuzz.arrays import TENSOR_LIMIT, tensor_frames
from tests.fuzz.script import Script, check_words


@functools.cache
def _cipher(keys: DirectionKeys, suite: int) -> AESGCM | ChaCha20Poly1305:
    return AESGCM(keys.key) if suite == 1 else ChaCha20Poly1305(keys.key)


FIRST = DirectionKeys(bytes(range(32)), bytes(range(12)))
_KEYS = [FIRST]
while len(_KEYS) < 8:
    _KEYS.append(_KEYS[-1].next())


class _Peer:
    """Seals whatever it is given, right or wrong, under the keys that are due."""

    def __init__(self, suite: int) -> None:
        self._suite = suite
        self._number = 0
        self._epoch = 0

    def seal(self, plain: bytes) -> bytes:
        keys = _KEYS[self._epoch]
        header = (len(plain) + 16).to_bytes(4, "big")
        nonce = (int.from_bytes(keys.iv, "big") ^ self._number).to_bytes(12, "big")
        self._number += 1
        sealed = _cipher(keys, self._suite).encrypt(nonce, plain, header)
        if plain[:1] == b"\x08" and len(plain) == 5 and self._epoch + 1 < len(_KEYS):
            self._epoch, self._number = self._epoch + 1, 0
        return header + sealed


def frames(data: bytes) -> None:
    """A stream from a member that may say anything, bent or not, however it arrives; and what a link does with it."""
    script = Script(data)
    flags = script.number()
    suite = 1 + (flags & 1)
    reader = FrameReader(Opener(FIRST, suite))
    heart = _Receiver()
    sent: list[bytes] = []
    if flags & 2:
        stream = script.rest()
    else:
        peer, stream = _Peer(suite), b""
        bend_at, bend = (script.number(2), script.number()) if flags & 4 else (0, 0)
        order = [script.number() for _ in range(8)] if flags & 8 else []
        while script and len(sent) < 6:
            sent += _plains(script)
        sealed = [peer.seal(plain) for plain in sent]
        if order:
            sealed = [sealed[i % len(sealed)] for i in order] if sealed else []
        stream = b"".join(sealed)
        if bend and stream:
            at = bend_at % len(stream)
            stream = stream[:at] + bytes([stream[at] ^ bend]) + stream[at + 1 :]
        flags |= 2 if bend or order else 0
    step = 1 + (flags >> 4) ** 3
    opened = 0
    fed = 0
    try:
        while fed < len(stream):
            piece = stream[fed:] if fed >= 24 * step else stream[fed : fed + step]
            fed += len(piece)
            reader.feed(piece)
            assert len(reader._buffer) <= max(1 << 16, 4 * fed), "space grows with what arrives"
            while (frame := heart.next(reader) if flags & 16 else reader.next_frame()) is not None:
                if not flags & 2:
                    while sent[opened][:1] == b"\x08":
                        opened += 1
                    plain = sent[opened]
                    assert (frame.kind, frame.channel) == (plain[0], int.from_bytes(plain[1:5], "big"))
                    assert frame.payload == plain[5:]
                opened += 1
                heart.take(frame)
        reader.receive_eof()
    except MlxcelError as error:
        check_words(error)
        with contextlib.suppress(MlxcelError):
            assert reader.opener._failed is False or reader.next_frame() is None
    assert opened <= MAX_FRAMES


def _plains(script: Script) -> list[bytes]:
    """Kind, channel and payload of the next frame, mostly of ones that exist; or of those of one tensor."""
    head = script.number()
    kind, form = head & 15, head >> 4
    channel = script.number(4) if form == 15 else form & 3
    if kind == 12:
        return [b"\4" + channel.to_bytes(4, "big") + payload for payload in tensor_frames(script)]
    payload = script.long() if form & 4 else script.short()
    if form & 8 and kind in {1, 2}:
        payload += bytes(script.number(2))
    return [bytes([kind]) + channel.to_bytes(4, "big") + payload]


class _Receiver:
    """Does with frames what links do: every decoder behind the opener, and the credits."""

    def __init__(self) -> None:
        self._may_send = SendCredits()
        self._credits = ReceiveCredits()
        self._assembler = Assembler(limit=TENSOR_LIMIT, place=lambda _, size: memoryview(bytearray(size)))

    def next(self, reader: FrameReader) -> Frame | None:
        """As a hot link takes frames: opened into the memory of the tensor that is on its way."""
        while (plain := reader.next_plain(self._assembler.landing)) is not None:
            frame = reader.opener.frame(plain)
            if frame.kind is not Kind.REKEY:
                return frame
            self._assembler.settle()
        return None

    def take(self, frame: Frame) -> None:
        if frame.kind in {Kind.TENSOR, Kind.KV, Kind.STREAM}:
            self._credits.received(frame.channel)
            assert self._credits._left[frame.channel] >= 0
            if granted := self._credits.taken(frame.channel):
                assert granted <= INITIAL
        if frame.kind is Kind.CONTROL or frame.kind is Kind.STREAM:
            messages.unpack(frame.payload)
        elif frame.kind is Kind.CREDIT:
            self._may_send.grant(frame.channel, credit_count(frame.payload))
        elif frame.kind is Kind.CLOSE:
            assert close_reason(frame.payload).isprintable()
        elif frame.kind is Kind.TENSOR and (done := self._assembler.add(frame.channel, frame.payload)):
            Tag.parse(done[0].name)
        self._assembler.settle()
