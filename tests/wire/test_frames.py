"""Frames: what is not the next frame the peer sealed never surfaces, and keys are replaced in time."""

from __future__ import annotations

import array
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from mlxcel_nb.errors import FrameError, WireError
from mlxcel_nb.wire import frames
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import (
    MAX_FILLER,
    MAX_PAYLOAD,
    MIN_LENGTH,
    Frame,
    Kind,
    Opener,
    Sealer,
    close_reason,
    credit_count,
)
from mlxcel_nb.wire.keys import DirectionKeys
from tests.wire.ends import established, one_way

SUITES = pytest.mark.parametrize("suite", [1, 2], ids=["aes-256-gcm", "chacha20-poly1305"])


def opened(opener: Opener, frame: bytes) -> tuple[Kind, int, bytes]:
    got = opener.open(frame[:4], frame[4:])
    return got.kind, got.channel, bytes(got.payload)


def raw_frame(keys: DirectionKeys, sequence: int, plain: bytes) -> bytes:
    """A frame made by hand, as a broken member with the right key could."""
    header = struct.pack("!I", len(plain) + 16)
    nonce = (int.from_bytes(keys.iv, "big") ^ sequence).to_bytes(12, "big")
    return header + AESGCM(keys.key).encrypt(nonce, plain, header)


KEYS = DirectionKeys(bytes(range(32)), bytes(range(12)))


# ------------------------------------------------------------------------------------------------ the good way


@SUITES
@pytest.mark.parametrize("size", [0, 1, 8, 65536, MAX_PAYLOAD])
def test_a_payload_of_any_legal_size_arrives(suite: int, size: int) -> None:
    sealer, opener = one_way(suite)
    payload = bytes(size)
    sealed = sealer.seal(Kind.TENSOR, 7, payload)
    assert len(sealed) == size + MIN_LENGTH + 4
    assert opener.frame_length(sealed[:4]) == size + MIN_LENGTH
    got = opener.open(sealed[:4], sealed[4:])
    assert got.kind is Kind.TENSOR and got.channel == 7 and got.payload == payload


def test_parts_of_any_type_are_joined() -> None:
    sealer, opener = one_way()
    parts: list[Any] = [
        b"a",
        bytearray(b"bc"),
        memoryview(b""),
        array.array("f", [1.5, -2]),
        memoryview(bytes(4)).cast("B", (2, 2)),
    ]
    sealed = bytes(sealer.seal(Kind.KV, 2**32 - 1, *parts))
    assert opened(opener, sealed) == (Kind.KV, 2**32 - 1, b"abc" + struct.pack("=2f", 1.5, -2) + bytes(4))


def test_numpy_arrays_of_every_type_can_be_sent() -> None:
    sealer, opener = one_way()
    for name in ("float16", "float64", "complex64", "bool", "uint64"):
        value = np.arange(6).reshape(2, 3).astype(name)
        assert opened(opener, bytes(sealer.seal(Kind.TENSOR, 1, value)))[2] == value.tobytes()
    assert opened(opener, bytes(sealer.seal(Kind.TENSOR, 1, np.zeros((0, 4)))))[2] == b""


def test_a_payload_cannot_be_written_to_and_lives_until_the_next_frame() -> None:
    sealer, opener = one_way()
    first = bytes(sealer.seal(Kind.STREAM, 1, b"first"))
    second = bytes(sealer.seal(Kind.STREAM, 1, b"other"))
    got = opener.open(first[:4], first[4:]).payload
    assert got.readonly and bytes(got) == b"first"
    opener.open(second[:4], second[4:])
    assert bytes(got) == b"other"


def test_buffers_are_reused() -> None:
    sealer, opener = one_way()
    payload = bytes(1 << 20)
    for _ in range(2):
        sealed = sealer.seal(Kind.TENSOR, 1, payload)
        opener.open(sealed[:4], sealed[4:])
    tracemalloc.start()
    for _ in range(20):
        sealed = sealer.seal(Kind.TENSOR, 1, payload)
        opener.open(sealed[:4], sealed[4:])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000


def test_directions_do_not_share_keys() -> None:
    client, server = established()
    sealer = Sealer(client.send, 1)
    sent = bytes(sealer.seal(Kind.PING, 0, bytes(8)))
    with pytest.raises(FrameError, match="authenticate"):
        opened(Opener(client.receive, 1), sent)
    assert opened(Opener(server.receive, 1), sent) == (Kind.PING, 0, bytes(8))


# ------------------------------------------------------------------------------------------------ attacks


@SUITES
@given(st.data())
def test_a_flipped_bit_anywhere_ends_the_connection(suite: int, data: st.DataObject) -> None:
    """Case 42's flipped bit: the tag finds it, wherever it is."""
    sealer, opener = one_way(suite)
    sealed = bytearray(sealer.seal(Kind.TENSOR, 1, b"activations"))
    bit = data.draw(st.integers(0, 8 * len(sealed) - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    reader = FrameReader(opener)
    reader.feed(sealed)
    with pytest.raises(FrameError):
        assert reader.next_frame() is None  # a longer length waits
        reader.receive_eof()


def test_an_opener_that_has_failed_once_opens_nothing_more() -> None:
    sealer, opener = one_way()
    first = bytes(sealer.seal(Kind.STREAM, 1, b"a"))
    with pytest.raises(FrameError):
        opened(opener, first[:-1] + bytes([first[-1] ^ 1]))
    with pytest.raises(FrameError, match="after the end"):
        opened(opener, first)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (b"\x09\0\0\0\0", "unknown kind 9"),
        (b"\xff\0\0\0\0", "unknown kind 255"),
        (b"\x00\0\0\0\0", "close frame with 0"),
        (b"\x01\0\0\0\0" + bytes(7), "ping frame with 7"),
        (b"\x02\0\0\0\0" + bytes(9 + MAX_FILLER), "pong frame with"),
        (b"\x08\0\0\0\0x", "rekey frame with 1"),
    ],
)
def test_a_member_s_bent_frame_closes(plain: bytes, words: str) -> None:
    """Case 49 with the right key."""
    opener = Opener(KEYS, 1)
    with pytest.raises(FrameError, match=words):
        opened(opener, raw_frame(KEYS, 0, plain))
    with pytest.raises(FrameError, match="after the end"):
        opened(opener, raw_frame(KEYS, 1, b"\x03\0\0\0\0"))


# ------------------------------------------------------------------------------------------------ rekeying


@SUITES
@pytest.mark.parametrize("every", [1, 2, 5])
def test_keys_are_replaced_every_so_many_frames(suite: int, every: int) -> None:
    sealer, opener = one_way(suite, rekey_every=every)
    reader = FrameReader(opener)
    for i in range(11):
        reader.feed(sealer.seal(Kind.STREAM, 1, bytes([i])))
        assert [bytes(frame.payload) for frame in reader.frames()] == [bytes([i])]
    assert sealer.rekeys == opener.rekeys == 10 // every


def test_a_frame_sealed_under_an_old_key_is_not_opened_under_the_next() -> None:
    sealer, opener = one_way()
    first = bytes(sealer.seal(Kind.STREAM, 1, b"a"))
    opened(opener, first)
    opened(opener, bytes(sealer.seal(Kind.REKEY, 0)))
    with pytest.raises(FrameError, match="authenticate"):
        opened(opener, first)


def test_a_sender_counts_its_rekey_frame_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAMES", 4)
    sealer, opener = one_way()
    reader = FrameReader(opener)
    for _ in range(20):
        reader.feed(sealer.seal(Kind.STREAM, 1, b""))
        assert len(list(reader.frames())) == 1
    assert sealer.rekeys == 6, "three frames and a rekey frame under each key"


def test_a_receiver_closes_when_keys_grow_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer, opener = one_way()
    sent = [bytes(sealer.seal(Kind.STREAM, 1, b"")) for _ in range(4)]
    monkeypatch.setattr(frames, "MAX_FRAMES", 3)
    for frame in sent[:3]:
        opened(opener, frame)
    with pytest.raises(FrameError, match="did not replace its keys in time"):
        opened(opener, sent[3])


def test_bytes_of_ciphertext_are_limited_as_frames_are(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, opener = one_way()
    sent = [bytes(lazy.seal(Kind.STREAM, 1, bytes(95))) for _ in range(11)]
    monkeypatch.setattr(frames, "MAX_CIPHERTEXT", 1000)
    for frame in sent[:10]:
        opened(opener, frame)
    with pytest.raises(FrameError, match="in time"):
        opened(opener, sent[10])

    sealer, opener = one_way()
    reader = FrameReader(opener)
    for _ in range(40):
        reader.feed(sealer.seal(Kind.STREAM, 1, bytes(95)))
        assert len(list(reader.frames())) == 1
    assert sealer.rekeys >= 4


@pytest.mark.parametrize("every", [0, -1, frames.MAX_FRAMES])
def test_a_rekey_interval_outside_the_protocol_is_refused(every: int) -> None:
    with pytest.raises(ValueError, match="rekey_every"):
        one_way(rekey_every=every)


# ------------------------------------------------------------------------------------------------ the end


def test_nothing_follows_a_close_frame() -> None:
    sealer, opener = one_way()
    reader = FrameReader(opener)
    reader.feed(sealer.seal_close("bye"))
    with pytest.raises(FrameError, match="closed the connection already"):
        sealer.seal(Kind.STREAM, 1, b"more")
    reader.feed(bytes(25))
    assert next(reader.frames()).kind is Kind.CLOSE
    with pytest.raises(FrameError, match="after the end"):
        reader.next_frame()


@pytest.mark.parametrize("reason", ["", "x" * 255, "é" * 200])
def test_a_reason_is_cut_to_fit(reason: str) -> None:
    sealer, opener = one_way()
    payload = opened(opener, bytes(sealer.seal_close(reason)))[2]
    assert reason.startswith(close_reason(payload)) and len(payload) <= 256


@pytest.mark.parametrize("payload", [b"\x05abc", b"\x01abc", b"\x01\xff"])
def test_a_bent_reason_is_an_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        close_reason(payload)


def test_a_reason_cannot_steer_a_terminal() -> None:
    assert close_reason(b"\x05\x1b[2Jx") == "?[2Jx"


@pytest.mark.parametrize("size", [0, 3, 5])
def test_a_credit_has_four_bytes_for_whoever_heeds_it(size: int) -> None:
    assert credit_count(b"\0\0\0\x20") == 32
    assert credit_count(bytes(4)) == 0
    with pytest.raises(WireError, match=f"credit frame of {size}"):
        credit_count(bytes(size))


@pytest.mark.parametrize(
    ("kind", "size"),
    [(Kind.PING, 7), (Kind.CREDIT, 5), (Kind.REKEY, 1), (Kind.CLOSE, 0), (Kind.TENSOR, MAX_PAYLOAD + 1)],
)
def test_a_frame_that_a_peer_would_refuse_is_not_sent(kind: Kind, size: int) -> None:
    sealer, opener = one_way()
    with pytest.raises(FrameError, match="fit"):
        sealer.seal(kind, 0, bytes(size))
    assert opened(opener, bytes(sealer.seal(Kind.STREAM, 0, b"next"))) == (Kind.STREAM, 0, b"next")


def test_a_frame_shows_no_key() -> None:
    sealer, opener = one_way()
    for shown in (repr(sealer), repr(opener), repr(Frame(Kind.PING, 0, memoryview(b"")))):
        assert KEYS.key.hex() not in shown and repr(KEYS.key) not in shown
