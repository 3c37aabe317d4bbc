"""What is kept at hand for small tensors of one type and shape, so that nothing of it is made again for each of them.

Owned by the thread that owns the links they go over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlxcel_nb.net.collectives.ways import Way
from mlxcel_nb.net.hot.inbox import TENSOR_CHANNEL
from mlxcel_nb.wire import tensors
from mlxcel_nb.wire.frames import Kind, frame_head
from mlxcel_nb.wire.mould import Mould

SHORT_BYTES = 256 * 1024
"""Larger tensors gain nothing from polling: reading them in crumbs costs more than waking up late."""

MAX_SHAPES = 16
"""Kept by one owner."""

_FRAME_HEAD = frame_head(Kind.TENSOR, TENSOR_CHANNEL)
_BEHIND = 8
"""Bytes of a tensor's header behind its name."""


@dataclass(frozen=True, slots=True)
class Moulds:
    """One for what this rank sends, and one for what each rank sends it, with the views of their data.

    Attributes:
        name: where the tag stands in `out`; all else in front of the data is in its place from the start.
    """

    out: Mould
    name: memoryview
    ins: list[Mould]
    views: list[Any]


@dataclass(slots=True)
class Shape:
    """Tensors of one type and shape.

    Args:
        size: in bytes.
        kind: what NumPy holds the elements in; None leaves them bytes, as many as come.
        way: how they are summed.
    """

    dtype: str
    dims: tuple[int, ...]
    size: int
    kind: type[np.generic] | None = None
    way: Way = Way.DIRECT
    moulds: dict[int, Moulds] = field(default_factory=dict)
    """By the bytes of the tag."""
    _before: bytes = b""
    _behind: bytes = b""

    def __post_init__(self) -> None:
        nameless = tensors.encode_header(self.dtype, self.dims, "", self.size)
        self._before = _FRAME_HEAD + nameless[: -_BEHIND - 1]
        self._behind = nameless[-_BEHIND:]

    def head(self, name: bytes) -> bytes:
        """What leads the plaintext of such a tensor in one frame."""
        return b"%b%c%b%b" % (self._before, len(name), name, self._behind)

    def moulds_for(self, name: bytes, ranks: int) -> Moulds:
        """Those for a tag as long as `name`."""
        return self.moulds.get(len(name)) or self._add_moulds(name, ranks)

    def _add_moulds(self, name: bytes, ranks: int) -> Moulds:
        head, begin = self.head(name), len(self._before) + 1
        out, *ins = (Mould(len(head), self.size) for _ in range(1 + ranks))
        out.head[:] = head
        views = [self.view(mould.data) for mould in ins]
        moulds = self.moulds[len(name)] = Moulds(out, out.head[begin : begin + len(name)], ins, views)
        return moulds

    def lay_out(self, name: bytes, data: memoryview, ranks: int) -> Moulds:
        """The tensor, ready to be sealed."""
        moulds = self.moulds.get(len(name)) or self._add_moulds(name, ranks)
        moulds.name[:] = name
        moulds.out.data[:] = data
        return moulds

    def view(self, data: memoryview) -> Any:
        """The tensor in `data`: an array, or the bytes themselves."""
        return data if self.kind is None else np.frombuffer(data, self.kind).reshape(self.dims)


def keep(shapes: dict[tuple[str, tuple[int, ...]], Shape], shape: Shape) -> Shape:
    """Put `shape` among those at hand; when there are too many, all others go."""
    if len(shapes) >= MAX_SHAPES:
        shapes.clear()
    shapes[shape.dtype, shape.dims] = shape
    return shape
