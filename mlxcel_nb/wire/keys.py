"""Key derivation: RFC 5869 with SHA-256, and the keys WIRE.md names.

Pure functions of their inputs; any thread may call. Outputs are secrets: callers keep them out of reprs.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

SALT = b"mlxcel-nb/5"
KEY_BYTES = 32
IV_BYTES = 12
_HASH_BYTES = 32


def hkdf_extract(salt: bytes, ikm: bytes) -> bytes:
    """The pseudo-random key of RFC 5869, section 2.2."""
    return hmac.digest(salt, ikm, "sha256")


def hkdf_expand(prk: bytes, info: bytes, length: int) -> bytes:
    """`length` bytes of output keying material, RFC 5869, section 2.3."""
    if not 1 <= length <= 255 * _HASH_BYTES:
        raise ValueError(f"HKDF cannot expand to {length} bytes")
    output = block = b""
    counter = 0
    while len(output) < length:
        counter += 1
        block = hmac.digest(prk, block + info + bytes([counter]), "sha256")
        output += block
    return output[:length]


def hkdf(ikm: bytes, *, salt: bytes = SALT, info: bytes, length: int = KEY_BYTES) -> bytes:
    """Extract, then expand."""
    return hkdf_expand(hkdf_extract(salt, ikm), info, length)


def auth_key(secret: bytes) -> bytes:
    """K_auth, under which both sides of a handshake prove that they know the secret."""
    return hkdf(secret, info=b"handshake auth")


def beacon_key(secret: bytes) -> bytes:
    """K_beacon, under which discovery datagrams are tagged."""
    return hkdf(secret, info=b"beacon")


@dataclass(frozen=True)
class DirectionKeys:
    """What one direction of a connection encrypts with, until its next rekey."""

    key: bytes = field(repr=False)
    iv: bytes = field(repr=False)

    def next(self) -> DirectionKeys:
        """The keys after a rekey frame. The step is one-way: old frames stay closed to whoever learns the new key."""
        return DirectionKeys(
            hkdf_expand(self.key, b"rekey key", KEY_BYTES), hkdf_expand(self.key, b"rekey iv", IV_BYTES)
        )


def direction_keys(prk: bytes, direction: bytes, *, path: int | None = None) -> DirectionKeys:
    """Keys of one `direction` (`b"c2s"` or `b"s2c"`) of a connection, or of a further `path` between the same two."""
    label = direction if path is None else b"path" + bytes([path]) + direction
    return DirectionKeys(hkdf_expand(prk, label + b" key", KEY_BYTES), hkdf_expand(prk, label + b" iv", IV_BYTES))
