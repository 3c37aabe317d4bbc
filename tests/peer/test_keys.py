"""Keys and secrets: never shown, compared in constant time; no nonce is used twice, no key for long."""

from __future__ import annotations

import ast
import contextlib
import itertools
import random
import struct
from pathlib import Path

import pytest

from mlxcel_nb.errors import FrameError
from mlxcel_nb.wire import frames
from mlxcel_nb.wire.frame_reader import FrameReader
from mlxcel_nb.wire.frames import Kind, Opener, Sealer
from mlxcel_nb.wire.keys import DirectionKeys
from mlxcel_nb.wire.mould import Mould
from tests.peer import codec, ends
from tests.peer.codec import Direction
from tests.peer.ends import OLDER, SECRET, STRANGER
from tests.peer.peer import Peer

PACKAGE = Path(__file__).parents[2] / "mlxcel_nb"
GARBLED = struct.pack(">I", 200) + bytes(200)
"""A frame that does not authenticate."""

KEYS = DirectionKeys(bytes(range(32)), bytes(range(12)))


# ----------------------------------------------------------------------------------------------------- shown


def test_at_debug_neither_command_prints_a_secret_or_a_key(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer knows every key of its connections, so it can look for them in all that was printed."""
    monkeypatch.setenv("MLXCEL_NB_LOG", "DEBUG")
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    known = [SECRET, OLDER, STRANGER, *(codec.hkdf(secret, b"handshake auth") for secret in (SECRET, OLDER))]
    known.append(codec.hkdf(SECRET, b"beacon"))

    def note(peer: Peer) -> None:
        for way in (peer.out, peer.into):
            known.extend((way.key, way.iv))

    with ends.net_listen(files, "--previous-secret-file", files["older"], "--rekey-every", "2") as listener:
        for secret in (SECRET, OLDER):
            with listener.dial(secret, rekey_every=2) as peer:
                note(peer.be_client())
                peer.ping()
                peer.pong()
                note(peer)
                peer.write(GARBLED)  # and one that ends badly
                peer.last_words()
        with listener.dial(STRANGER) as peer, contextlib.suppress(Exception):
            peer.be_client()
        listener.command.wait_for("refused")
        listener.command.process.terminate()
        listener.command.end()
    with ends.net_ping(files, "--rekey-every", "2") as (ping, server), ends.accept(server) as peer:
        note(peer.be_server())
        peer.write(GARBLED)
        peer.last_words()
        ping.end()
    printed = listener.command.text + ping.text
    assert "does not authenticate" in printed
    for value in known:
        for spelling in (value.hex(), value.hex().upper(), repr(value)[2:-1], value.decode("latin-1")):
            assert spelling not in printed, "a secret or a key was printed"


def test_what_holds_keys_shows_none() -> None:
    held = [KEYS, Sealer(KEYS, 1), Opener(KEYS, 1), FrameReader(Opener(KEYS, 1))]
    for one, value in itertools.product(held, (KEYS.key, KEYS.iv)):
        assert value.hex() not in repr(one) and repr(value) not in repr(one)


# ------------------------------------------------------------------------------------------------- comparisons


def test_tags_and_secrets_are_compared_in_constant_time() -> None:
    """No `==` on either, anywhere on the floors that see them: `hmac.compare_digest` or the cipher's own check."""
    telling = ("tag", "mac", "digest", "proof", "secret", "key", "signature")
    harmless = {"TAG_BYTES", "MIN_BYTES", "MAX_BYTES"}
    suspects = []
    for path in sorted((*PACKAGE.glob("wire/*.py"), PACKAGE / "cluster" / "secret.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
                for side in (node.left, *node.comparators):
                    name = (
                        side.id if isinstance(side, ast.Name) else side.attr if isinstance(side, ast.Attribute) else ""
                    )
                    if any(word in name.lower() for word in telling) and name not in harmless:
                        suspects.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not suspects


# ------------------------------------------------------------------------------------------------------ nonces


class Recorder:
    """In place of a cipher: remembers every nonce it sealed under."""

    used: set[tuple[bytes, bytes]]

    def __init__(self, key: bytes) -> None:
        self._key, self._cipher = key, codec.SUITES[1](key)

    def encrypt_into(self, nonce: bytes, data: memoryview, aad: bytes, buffer: memoryview) -> int:
        assert (self._key, nonce) not in Recorder.used, "a nonce twice under one key"
        Recorder.used.add((self._key, nonce))
        sealed = self._cipher.encrypt(nonce, data, aad)
        buffer[:] = sealed
        return len(sealed)


@pytest.mark.parametrize("every", [None, 1, 3])
def test_no_nonce_is_used_twice_whatever_fails_between(every: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of forbidden sizes, parts that are no buffers, frames after the close: none takes a number along."""
    monkeypatch.setitem(frames._CIPHERS, 1, Recorder)
    Recorder.used = set()
    sealer, draw = Sealer(KEYS, 1, rekey_every=every), random.Random(0)
    out, sent, mould = b"", 0, Mould(30, 64)
    good = [(Kind.PING, b"12345678"), (Kind.CONTROL, b"\x80"), (Kind.REKEY, b""), (Kind.TENSOR, bytes(100_000))]
    bad = [(Kind.PING, b"1"), (Kind.CREDIT, b"123"), (Kind.REKEY, b"x"), (Kind.CONTROL, "no buffer"), (Kind.CLOSE, b"")]
    for _ in range(600):
        if draw.random() < 0.5:
            sealer.make_ready()  # which may come at any time, and be followed by anything
        if draw.random() < 0.4:
            with pytest.raises((FrameError, TypeError)):
                kind, part = draw.choice(bad)
                sealer.seal(kind, 1, part)
        else:
            kind, part = draw.choice(good)
            if draw.random() < 0.3:  # the short way of small tensors
                mould.plain[:] = bytes([Kind.TENSOR]) + draw.randbytes(len(mould.plain) - 1)
                out += bytes(sealer.seal_mould(mould))
            else:
                out += bytes(sealer.seal(kind, 1, part))
            sent += 1
    sealer.make_ready()
    out += bytes(sealer.seal_close("done"))
    sealer.make_ready()
    for kind, part in good:
        with pytest.raises(FrameError):
            sealer.seal(kind, 1, part)
    with pytest.raises(FrameError):
        sealer.seal_mould(mould)
    opener, opened = Direction(1, KEYS.key, KEYS.iv), 0
    while out:  # the other implementation follows every number and every rekey
        length = 4 + int.from_bytes(out[:4], "big")
        if opener.open(out[:length])[0] == codec.REKEY:
            opener.rekey()
        opened, out = opened + 1, out[length:]
    assert opened == len(Recorder.used) >= sent


def test_a_receiver_that_made_ready_for_a_frame_opens_whatever_comes() -> None:
    """Frames of a mould's size and others, in any order, through rekeys; a forged one is refused the short way too."""
    out, opener, draw, mould = Direction(1, KEYS.key, KEYS.iv), Opener(KEYS, 1), random.Random(1), Mould(13, 64)
    for _ in range(400):
        if draw.random() < 0.7:
            opener.make_ready()
        if draw.random() < 0.1:
            assert take(opener, out.seal(codec.REKEY)).kind is Kind.REKEY
            out.rekey()
        elif draw.random() < 0.5:
            payload = draw.randbytes(8 + 64)
            mould.frame[:] = out.seal(codec.TENSOR, 1, payload)
            opener.open_mould(mould)
            assert opener.frame(mould.plain) == (Kind.TENSOR, 1, payload)
        else:
            assert take(opener, out.seal(codec.PING, 0, b"12345678")).payload == b"12345678"
    opener.make_ready()
    mould.frame[:] = out.seal(codec.TENSOR, 1, bytes(72))
    mould.frame[20] ^= 1
    with pytest.raises(FrameError, match="authenticate"):
        opener.open_mould(mould)


# ------------------------------------------------------------------------------------------------- old keys


def at_number(number: int) -> tuple[Opener, Direction]:
    """A receiver that has opened `number` frames under one key, and the sender that sealed them."""
    opener, out = Opener(KEYS, 1), Direction(1, KEYS.key, KEYS.iv, number)
    opener._frames = number
    return opener, out


def take(opener: Opener, frame: bytes) -> frames.Frame:
    return opener.open(frame[:4], frame[4:])


def test_the_frame_behind_the_last_of_a_key_is_refused() -> None:
    """2^20 frames under one key, the rekey frame among them; not one more. The counter starts just before the limit."""
    opener, out = at_number((1 << 20) - 2)
    for _ in range(2):
        assert take(opener, out.seal(codec.PING, 0, b"12345678")).kind is Kind.PING
    with pytest.raises(FrameError, match="did not replace its keys"):
        take(opener, out.seal(codec.PING, 0, b"12345678"))
    opener, out = at_number((1 << 20) - 1)
    assert take(opener, out.seal(codec.REKEY)).kind is Kind.REKEY  # the last place may be the rekey's
    out.rekey()
    assert take(opener, out.seal(codec.PING, 0, b"12345678")).kind is Kind.PING


def test_bytes_beyond_2_36_under_one_key_are_refused() -> None:
    opener, out = at_number(5)
    opener._ciphertext = (1 << 36) - 100
    assert take(opener, out.seal(codec.PING, 0, b"12345678")).kind is Kind.PING
    with pytest.raises(FrameError, match="did not replace its keys"):
        take(opener, out.seal(codec.PING, 0, bytes(200)))


def test_our_own_sender_rekeys_before_either_limit() -> None:
    for name, limit in (("_frames", (1 << 20) - 1), ("_ciphertext", (1 << 36) - 40)):
        sealer, opener = Sealer(KEYS, 1), Direction(1, KEYS.key, KEYS.iv)
        setattr(sealer, name, limit)
        opener.number = sealer._frames
        frame = bytes(sealer.seal(Kind.PING, 0, b"12345678"))
        length = 4 + struct.unpack(">I", frame[:4])[0]
        assert opener.open(frame[:length]) == (codec.REKEY, 0, b""), name
        opener.rekey()
        assert opener.open(frame[length:])[0] == codec.PING
