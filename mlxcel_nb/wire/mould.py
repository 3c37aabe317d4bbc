"""Room for frames of one size, laid out once and filled again and again: for small tensors, where microseconds count.

Belongs to one thread. The same mould serves several connections one after the other, as what is sealed in it or opened
into it is used before the next.
"""

from __future__ import annotations

from mlxcel_nb.wire.frames import ALIGNMENT, LENGTH_BYTES, TAG_BYTES


class Mould:
    """A frame and its plaintext.

    Args:
        lead: bytes of the plaintext in front of the data: the frame's head and the tensor's header.
        size: bytes of data.

    Attributes:
        whole: bytes of the frame.
        sealed: bytes of its ciphertext, tag included.
        claimed, due: `claimed[0]` is the length that stands in `frame`, and is equal to `due` where that is as long as
            this one; numbers in this machine's byte order, for comparing them alone.
    """

    __slots__ = ("body", "claimed", "data", "due", "frame", "head", "length", "plain", "sealed", "whole")

    def __init__(self, lead: int, size: int) -> None:
        begin = -lead % ALIGNMENT
        self.plain = memoryview(bytearray(begin + lead + size))[begin:]
        self.head, self.data = self.plain[:lead], self.plain[lead:]
        self.length = (lead + size + TAG_BYTES).to_bytes(LENGTH_BYTES, "big")
        self.frame = memoryview(bytearray(LENGTH_BYTES + lead + size + TAG_BYTES))
        self.frame[:LENGTH_BYTES] = self.length
        self.body = self.frame[LENGTH_BYTES:]
        self.whole, self.sealed = len(self.frame), len(self.body)
        self.claimed = self.frame[:LENGTH_BYTES].cast("I")
        self.due: int = self.claimed[0]
