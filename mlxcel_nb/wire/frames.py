"""Encrypted frames, without I/O: a `Sealer` for what leaves, an `Opener` for what arrives.

Each direction of a connection has one of each, and each belongs to one thread: a connection has exactly one
writer, so no nonce is used twice. Both work in buffers that grow once and are reused; what `seal` and `open`
return is valid until the next call. The cipher's `*_into` calls release the GIL.

A peer's frame is trusted once its tag holds, and then only to be from a member: lengths, kinds and sizes are
still checked here, contents by the codecs above. After any error an `Opener` opens nothing more.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from mlxcel_nb.errors import FrameError, WireError
from mlxcel_nb.wire.fields import Reader, clip, printable, str8
from mlxcel_nb.wire.keys import IV_BYTES, DirectionKeys

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from mlxcel_nb.wire.mould import Mould


class Kind(IntEnum):
    CLOSE = 0
    PING = 1
    PONG = 2
    CONTROL = 3
    TENSOR = 4
    KV = 5
    STREAM = 6
    CREDIT = 7
    REKEY = 8


LENGTH_BYTES = 4
TAG_BYTES = 16
HEAD_BYTES = 5
"""Kind and channel, inside the ciphertext."""

MIN_LENGTH = HEAD_BYTES + TAG_BYTES
MAX_LENGTH = (16 << 20) + (64 << 10)
MAX_PAYLOAD = MAX_LENGTH - MIN_LENGTH

MAX_FRAMES = 1 << 20
"""Frames under one key, the rekey frame among them."""
MAX_CIPHERTEXT = 1 << 36
"""Bytes of ciphertext under one key."""

PING_BYTES = 8
MAX_FILLER = 1 << 20
MAX_UNANSWERED_PINGS = 8
CREDIT_BYTES = 4

ALIGNMENT = 64
"""Where a copy of a payload begins, and where what is added up begins, is a multiple of this. Copying between addresses
that differ, modulo a page, by fewer bytes than a register holds is 15 times slower on some processors."""

FIRST_BUFFER = 64 << 10
"""What a buffer has at first; most frames are smaller."""

_HEAD = struct.Struct("!BI")
_CIPHERS: dict[int, type[AESGCM | ChaCha20Poly1305]] = {1: AESGCM, 2: ChaCha20Poly1305}
_REKEY = Kind.REKEY
_CLOSE = Kind.CLOSE
_CREDIT = Kind.CREDIT

# Indexed by kind: on this path, a tuple's item costs a tenth of an enumeration's look-up.
_KINDS = tuple(Kind)
_PAYLOADS: tuple[tuple[int, int], ...] = tuple(
    {
        Kind.CLOSE: (1, 256),
        Kind.PING: (PING_BYTES, PING_BYTES + MAX_FILLER),
        Kind.PONG: (PING_BYTES, PING_BYTES + MAX_FILLER),
        Kind.CREDIT: (CREDIT_BYTES, CREDIT_BYTES),
        Kind.REKEY: (0, 0),
    }.get(kind, (0, MAX_PAYLOAD))
    for kind in Kind
)
"""Smallest and largest payload of each kind."""


class Frame(NamedTuple):
    """What arrived. `payload` is a view into the opener's buffer, valid until the next frame is opened."""

    kind: Kind
    channel: int
    payload: memoryview


class _Direction:
    """Cipher, keys and counters of one direction, common to both ends of it."""

    def __init__(self, keys: DirectionKeys, suite: int) -> None:
        self._suite = suite
        self.rekeys = -1
        """How often the keys have been replaced."""
        self._use(keys)

    def _use(self, keys: DirectionKeys) -> None:
        self._keys = keys
        self._cipher: AESGCM | ChaCha20Poly1305 = _CIPHERS[self._suite](keys.key)
        self._iv = int.from_bytes(keys.iv, "big")
        self._frames = 0
        self._ciphertext = 0
        # What `make_ready` found. It holds for the frame of that number alone, so a nonce is never used twice.
        self._nonce, self._nonce_of = b"", -1
        self.rekeys += 1

    def make_ready(self) -> None:
        """See to what the next frame in a mould needs, while nobody waits for it yet."""
        if self._frames < MAX_FRAMES - 1 and self._ciphertext < MAX_CIPHERTEXT - 2 * MAX_LENGTH:
            self._nonce, self._nonce_of = self._next_nonce(), self._frames

    def _next_nonce(self) -> bytes:
        return (self._iv ^ self._frames).to_bytes(IV_BYTES, "big")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} suite {self._suite}, frame {self._frames} after {self.rekeys} rekeys>"


class Sealer(_Direction):
    """Turns payloads into frames.

    Args:
        keys: this direction's first keys.
        suite: the handshake's cipher suite.
        rekey_every: frames after which the keys are replaced; the most the protocol allows where not given.
    """

    def __init__(self, keys: DirectionKeys, suite: int, *, rekey_every: int | None = None) -> None:
        if rekey_every is None:
            rekey_every = MAX_FRAMES - 1
        if not 1 <= rekey_every < MAX_FRAMES:
            raise ValueError(f"rekey_every is {rekey_every}, not 1 to {MAX_FRAMES - 1}")
        super().__init__(keys, suite)
        self._rekey_every = rekey_every
        self._closed = False
        self._plain = memoryview(bytearray(FIRST_BUFFER))
        self._out = memoryview(bytearray(FIRST_BUFFER))

    def seal(self, kind: Kind, channel: int, *parts: ReadableBuffer) -> memoryview:
        """One frame whose payload is `parts` joined, with a rekey frame in front of it when one is due.

        The view that is returned is overwritten by the next call. Parts are C-contiguous buffers of any type;
        they are copied once.
        """
        views = [bytes_of(part) for part in parts]
        payload = sum(map(len, views))
        low, high = _PAYLOADS[kind]
        if not low <= payload <= high:
            raise FrameError(f"a {kind.name.lower()} frame of {payload} bytes; {low} to {high} fit")
        if kind is _REKEY and not self._closed:
            end = self._rekey()
            return self._out[:end]
        sealed = self._seal(HEAD_BYTES + payload, [frame_head(kind, channel), *views])
        self._closed = kind is _CLOSE
        return sealed

    def seal_mould(self, mould: Mould) -> memoryview:
        """As `seal`, of the plaintext that lies in `mould`, as a rule into its own frame."""
        frames = self._frames
        if self._nonce_of != frames or frames >= self._rekey_every or self._closed:
            return self._seal(len(mould.plain), [mould.plain])
        self._cipher.encrypt_into(self._nonce, mould.plain, mould.length, mould.body)
        self._frames = frames + 1
        self._ciphertext += mould.sealed
        return mould.frame

    def seal_close(self, reason: str) -> memoryview:
        """The close frame, with a `reason` that is cut where it does not fit."""
        return self.seal(Kind.CLOSE, 0, str8(clip(reason)))

    def _seal(self, size: int, parts: Sequence[bytes | memoryview]) -> memoryview:
        if self._closed:
            raise FrameError("this side has closed the connection already")
        start = self._rekey() if self._due(size + TAG_BYTES) else 0
        end = self._put(start, size, parts)
        return self._out[:end]

    def _due(self, length: int) -> bool:
        """Whether a rekey frame has to come before a frame of `length`."""
        return self._frames >= self._rekey_every or self._ciphertext + length + MIN_LENGTH > MAX_CIPHERTEXT

    def _rekey(self) -> int:
        end = self._put(0, HEAD_BYTES, [frame_head(_REKEY, 0)])
        self._use(self._keys.next())
        return end

    def _put(self, start: int, size: int, parts: Sequence[bytes | memoryview]) -> int:
        """Seal `parts`, `size` bytes together, behind the first `start` bytes of what goes out; where it ends."""
        begin = start + LENGTH_BYTES
        end = begin + size + TAG_BYTES
        if size + ALIGNMENT > len(self._plain):
            self._plain = memoryview(bytearray(room_for(size + ALIGNMENT)))
        if end > len(self._out):
            grown = memoryview(bytearray(room_for(end)))
            grown[:start] = self._out[:start]
            self._out = grown
        out = self._out
        first = -(size - len(parts[-1])) % ALIGNMENT  # so that the last part, the data, is aligned
        plain = self._plain[first : first + size]
        at = 0
        for part in parts:
            until = at + len(part)
            plain[at:until] = part
            at = until
        header = (size + TAG_BYTES).to_bytes(LENGTH_BYTES, "big")
        out[start:begin] = header
        self._cipher.encrypt_into(self._next_nonce(), plain, header, out[begin:end])
        self._frames += 1
        self._ciphertext += size + TAG_BYTES
        return end


class Opener(_Direction):
    """Turns frames back into payloads, and refuses every frame that is not the next one its peer sealed."""

    def __init__(self, keys: DirectionKeys, suite: int) -> None:
        super().__init__(keys, suite)
        self.closed = False
        """Whether the peer's close frame has been opened: the only clean end of a stream."""
        self._failed = False
        self._plain = memoryview(bytearray(FIRST_BUFFER))

    def frame_length(self, header: ReadableBuffer) -> int:
        """How many bytes follow the four of `header`; checked before anybody allocates them."""
        if self._failed or self.closed:
            raise self._fail("a frame after the end of the connection")
        length = int.from_bytes(header, "big")
        if not MIN_LENGTH <= length <= MAX_LENGTH:
            raise self._fail(f"a frame of {length} bytes; {MIN_LENGTH} to {MAX_LENGTH} are allowed")
        return length

    def open(self, header: ReadableBuffer, body: ReadableBuffer) -> Frame:
        """The frame of `header` (4 bytes) and `body` (as many as `frame_length` said).

        A rekey frame is acted on here; it is still returned, with its empty payload, for callers that count.
        """
        length = self.frame_length(header)
        body = memoryview(body)
        if len(body) != length:
            raise ValueError(f"the body has {len(body)} bytes, its header says {length}")
        return self.frame(self.decrypt(memoryview(header), body))

    def decrypt(self, header: bytes | memoryview, body: memoryview, into: memoryview | None = None) -> memoryview:
        """The plaintext of a frame whose length has been checked; for `frame`, whatever else it is used for.

        Args:
            into: where to, exactly as long as the plaintext; nothing in there is to be believed if this raises.
        """
        size = len(body) - TAG_BYTES
        if self._frames >= MAX_FRAMES or self._ciphertext + size > MAX_CIPHERTEXT:
            raise self._fail("the peer did not replace its keys in time")
        if into is None:
            if size > len(self._plain):
                self._plain = memoryview(bytearray(room_for(size)))
            into = self._plain[:size]
        try:
            self._cipher.decrypt_into(self._next_nonce(), body, header, into)
        except InvalidTag:
            raise self._fail("a frame that does not authenticate") from None
        self._frames += 1
        self._ciphertext += size
        return into

    def open_mould(self, mould: Mould) -> None:
        """As `decrypt`, of the frame that lies in `mould`, into its own plaintext."""
        if self._nonce_of != self._frames:
            self.decrypt(mould.length, mould.body, mould.plain)
            return
        try:
            self._cipher.decrypt_into(self._nonce, mould.body, mould.length, mould.plain)
        except InvalidTag:
            raise self._fail("a frame that does not authenticate") from None
        self._frames += 1
        self._ciphertext += len(mould.plain)

    def frame(self, plain: memoryview) -> Frame:
        """The frame of a plaintext, its kind and size checked and acted on."""
        size = len(plain) - HEAD_BYTES
        code = plain[0]
        if code >= len(_KINDS):
            raise self._fail(f"a frame of unknown kind {code}")
        kind = _KINDS[code]
        low, high = _PAYLOADS[code]
        if not low <= size <= high and kind is not _CREDIT:  # whoever heeds credits looks at them
            raise self._fail(f"a {kind.name.lower()} frame with {size} bytes of payload")
        if kind is _REKEY:
            self._use(self._keys.next())
        elif kind is _CLOSE:
            self.closed = True
        return Frame(kind, int.from_bytes(plain[1:HEAD_BYTES], "big"), plain[HEAD_BYTES:].toreadonly())

    def _fail(self, what: str) -> FrameError:
        self._failed = True
        return FrameError(f"the peer sent {what}" if what.startswith("a ") else what)


def frame_head(kind: Kind, channel: int) -> bytes:
    """What leads the plaintext of every frame."""
    return _HEAD.pack(kind, channel)


def close_reason(payload: ReadableBuffer) -> str:
    """What the peer said in its close frame, fit to be shown."""
    reader = Reader(memoryview(payload), "the close frame")
    reason = reader.str8("reason")
    reader.finish()
    return printable(reason)


def credit_count(payload: ReadableBuffer) -> int:
    """The number in a credit frame; 0 grants nothing and harms nothing."""
    if len(memoryview(payload)) != CREDIT_BYTES:
        raise WireError(f"a credit frame of {len(memoryview(payload))} bytes, not {CREDIT_BYTES}")
    return int.from_bytes(memoryview(payload), "big")


def bytes_of(part: ReadableBuffer) -> memoryview:
    """A buffer of any type as plain bytes in C order, without a copy where it is contiguous."""
    view = memoryview(part)
    if view.format == "B" and view.ndim == 1 and view.contiguous:
        return view
    if not view.nbytes:
        return memoryview(b"")
    try:
        return view.cast("B")
    except TypeError:  # strided: gathered in C order
        return memoryview(view.tobytes())


def room_for(size: int) -> int:
    """The next power of two: a few reallocations, then none."""
    return 1 << (size - 1).bit_length()
