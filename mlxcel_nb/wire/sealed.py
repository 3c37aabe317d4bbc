"""The cluster secret on its way to an engine, sealed to a key the engine made for this alone.

Pure but for the random source. The message crosses the control plane, whose operators are not members: only the
holder of the engine's private key can open it, once, and only under the node id and cluster it was meant for.
The control plane itself vouches for whose public key it is.
"""

from __future__ import annotations

from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mlxcel_nb.cluster.secret import MAX_BYTES, MIN_BYTES, Secret
from mlxcel_nb.errors import SecretError
from mlxcel_nb.wire.keys import IV_BYTES, hkdf

_PUBLIC_BYTES = 32
_TAG_BYTES = 16
_NONCE = bytes(IV_BYTES)
"""Zero is safe: the key seals one message and is forgotten."""


def seal_secret(
    secret: Secret | bytes, engine_public: bytes, *, node_id: str, cluster: str, private: bytes | None = None
) -> bytes:
    """The message that only the engine with `engine_public` can open. `private` fixes C for golden vectors."""
    plain = (secret if isinstance(secret, Secret) else Secret(secret)).reveal()
    own = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
    own_public = own.public_key().public_bytes_raw()
    key = _key(own, engine_public, own_public + engine_public, cluster)
    return own_public + AESGCM(key).encrypt(_NONCE, plain, node_id.encode())


class SealedBox:
    """An engine's end: `public` goes to the client, `open` takes its one good message."""

    def __init__(self, private: bytes | None = None) -> None:
        self._private: X25519PrivateKey | None = (
            X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        )
        self.public = self._private.public_key().public_bytes_raw()

    def open(self, message: bytes, node_id: str, cluster: str) -> bytes:
        """The secret in `message`. After the first good message the private key is gone.

        Raises:
            SecretError: a message for another engine, node or cluster, a damaged one, or a second one.
        """
        if self._private is None:
            raise SecretError("a sealed secret has been opened already", node=node_id)
        message = bytes(message)
        size = len(message) - _PUBLIC_BYTES - _TAG_BYTES
        if not MIN_BYTES <= size <= MAX_BYTES:
            raise SecretError(f"a sealed secret of {len(message)} bytes cannot be one", node=node_id)
        peer_public, box = message[:_PUBLIC_BYTES], message[_PUBLIC_BYTES:]
        key = _key(self._private, peer_public, peer_public + self.public, cluster)
        try:
            secret = AESGCM(key).decrypt(_NONCE, box, node_id.encode())
        except InvalidTag:
            raise SecretError(
                f"the sealed secret is not for this engine as {node_id!r} of cluster {cluster!r}",
                node=node_id,
                advice="Start the cluster again.",
            ) from None
        self._private = None
        return secret

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("the key of a sealed secret neither travels nor has a copy")

    def __repr__(self) -> str:
        return f"<SealedBox {'closed' if self._private is None else 'open'}>"


def _key(own: X25519PrivateKey, peer_public: bytes, publics: bytes, cluster: str) -> bytes:
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(peer_public))
    except ValueError:  # wrong length, or a point of low order
        raise SecretError("the key of a sealed secret is not a usable X25519 key") from None
    return hkdf(shared, info=b"sealed secret" + publics + cluster.encode())
