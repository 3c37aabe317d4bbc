"""Tensors that arrive on one hot link: put together, kept until asked for, and paid for with credits.

Belongs to the thread that owns the link; no I/O. A tensor is handed out as a view, of the buffer its frame was opened
into or of memory that is used again for the next one, so nothing large is copied or allocated in a steady state.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mlxcel_nb.errors import WireError
from mlxcel_nb.net.hot.tag import Tag
from mlxcel_nb.wire import tensors
from mlxcel_nb.wire.credits import ReceiveCredits
from mlxcel_nb.wire.frames import Frame

TENSOR_CHANNEL = 1
"""Both directions use the dialling end's first channel."""

KEPT_BYTES = 64 << 20
"""Tensors that arrived before they were asked for; beyond this the peer gets no credit until they are taken."""

MAX_TENSOR_BYTES = 4 << 30

_QUANTISED = int(tensors.Flag.QUANTISED)


@dataclass(eq=False, slots=True)
class Tensor:
    """A tensor that arrived. `data` is valid until the next call on the link it came by."""

    tag: Tag
    dtype: str
    dims: tuple[int, ...]
    data: memoryview


class Inbox:
    """What one peer sent.

    Args:
        grant: called with a channel and a count when the peer may send more.
    """

    def __init__(self, grant: Callable[[int, int], None]) -> None:
        self._grant = grant
        self._credits = ReceiveCredits()
        self._ungranted = 0
        self._assembler = tensors.Assembler(limit=MAX_TENSOR_BYTES, place=self._place, in_order=True)
        self.landing, self.settle = self._assembler.landing, self._assembler.settle
        self._landing = _memory(0)
        self._landing_used = False
        self._kept: collections.deque[Tensor] = collections.deque()
        self._kept_bytes = 0
        self.empty = True
        """Whether nothing waits to be asked for."""
        self.passed = 0
        """Tensor frames that came and were taken at once, and which the peer has no credit for yet."""
        self._lent: Tensor | None = None
        self._into: tuple[str, memoryview] | None = None

    def expect(self, name: str, into: memoryview | None) -> None:
        """Put the tensor called `name` together in `into`, if it comes in pieces and fits.

        None forgets the wish: from then on nothing is written there.
        """
        if self._into is not None:
            self._assembler.withdraw(self._into[1])
        self._into = None if into is None else (name, into)

    def add(self, frame: Frame, tag: Tag | None = None, name: str = "") -> Tensor | None:
        """Take a tensor frame; the tensor, if this completes one, for `lend` or `keep` or to be dropped.

        Args:
            tag, name: what is waited for, if anything: recognised without parsing.
        """
        if frame.channel != TENSOR_CHANNEL:
            raise WireError(f"a tensor frame on channel {frame.channel}, which nobody opened for it")
        self._credits.received(frame.channel)
        if self._kept_bytes > KEPT_BYTES:
            self._ungranted += 1
        else:
            self._took(frame.channel)
        whole = self._assembler.add(frame.channel, frame.payload)
        if whole is None:
            return None
        header, data = whole
        if header.flags & _QUANTISED:
            raise WireError(f"a quantised tensor {header.name!r:.60} on a hot link")
        # A sender finishes one tensor before it begins the next: what is incomplete now was abandoned.
        self._assembler.discard()
        if self._landing_used:
            in_use = [data, *(t.data for t in self._kept), *([self._lent.data] if self._lent else [])]
            self._landing_used = any(view.obj is self._landing for view in in_use)
        expected = tag is not None and header.name == name
        return Tensor(tag if expected and tag else Tag.parse(header.name), header.dtype, header.dims, data)

    def find(self, tag: Tag) -> Tensor | None:
        """The kept tensor of `tag`, lent; older ones are dropped."""
        while self._kept and self._kept[0].tag <= tag:
            tensor = self._kept.popleft()
            self._kept_bytes -= len(tensor.data)
            self.empty = not self._kept
            while self._ungranted and self._kept_bytes <= KEPT_BYTES:
                self._ungranted -= 1
                self._took(TENSOR_CHANNEL)
            if tensor.tag == tag:
                return self.lend(tensor)
        return None

    def keep(self, tensor: Tensor) -> None:
        """Hold `tensor` until it is asked for."""
        _own(tensor)
        self._kept.append(tensor)
        self.empty = False
        self._kept_bytes += len(tensor.data)

    def lend(self, tensor: Tensor) -> Tensor:
        """Hand `tensor` out until `reclaim`."""
        self._lent = tensor
        return tensor

    def apart(self, data: memoryview) -> memoryview:
        """`data`, which is about to be sent while more may come in: a copy where it lies in what is lent.

        Told by where it lies: an array over what is lent does not say whose memory that is.
        """
        if self._lent is None or not np.may_share_memory(np.frombuffer(data, np.uint8), self._lent.data):
            return data
        return memoryview(bytes(data))

    def reclaim(self) -> None:
        """What was lent, or passed, is no longer looked at."""
        while self.passed:
            self.passed -= 1
            self._credits.received(TENSOR_CHANNEL)
            self._took(TENSOR_CHANNEL)
        if self._lent is not None:
            if self._lent.data.obj is self._landing:
                self._landing_used = False
            self._lent = None

    def detach(self) -> None:
        """Before further frames are opened while a tensor is lent: give that tensor memory of its own."""
        if self._lent is not None:
            _own(self._lent)

    def end(self) -> None:
        """The link is over: keep nothing, and no memory for later either."""
        self._kept.clear()
        self._kept_bytes = 0
        self.empty = True
        self._landing = _memory(0)
        self._lent = None
        self._grant = lambda _channel, _count: None

    def _took(self, channel: int) -> None:
        if count := self._credits.taken(channel):
            self._grant(channel, count)

    def _place(self, header: tensors.TensorHeader, size: int) -> memoryview:
        """Where a tensor in pieces is put together: the same memory each time, unless it is still in use."""
        if self._into is not None and self._into[0] == header.name and len(self._into[1]) == size:
            return self._into[1]
        if self._landing_used:
            return memoryview(_memory(size))
        if len(self._landing) < size:
            self._landing = _memory(size)
        self._landing_used = True
        return memoryview(self._landing)[:size]


def _memory(size: int) -> npt.NDArray[np.uint8]:
    """So many bytes, of which the system gives those that are written to: what a peer claims costs nothing yet."""
    return np.empty(size, np.uint8)


def _own(tensor: Tensor) -> None:
    """Copy `tensor` out of the buffer frames are opened into, if it lies there."""
    if tensor.data.readonly:
        tensor.data = memoryview(bytearray(tensor.data))
