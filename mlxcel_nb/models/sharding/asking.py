"""What expert-parallel ranks send each other, as bytes: tokens with the experts they ask for, and the answers. Pure.

An ask is four numbers (type, rows, pairs, bytes of a row), for each pair of a token and an expert the token's row and
the expert, counted from the rank's first, and the rows: a token that asks for two experts of one rank travels once. An
answer is the same four numbers and a row for each pair, in the order of the ask. Numbers are uint32, little-endian.

Nothing of a peer's is believed: whatever is read fits together, or is refused naming the node. A token may ask for an
expert twice, as some routers let it, but not without end: so few bytes never stand for many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlxcel_nb.errors import WireError

TYPES = ("float32", "float16", "bfloat16")
"""Of activations, by their number on the wire."""

ITEM_BYTES = (4, 2, 2)

MOST_ASKED = 64
"""Experts that a token may ask a rank for, however few it has."""

MOST_BYTES = 1 << 30
"""An ask's tokens, each counted once for every expert it asks for. A chunk of a prompt stays several times below."""

_NUMBER = np.dtype("<u4")
_HEAD = 4


@dataclass(frozen=True)
class Ask:
    """Tokens of one rank for the experts of another.

    Args:
        kind: element type.
        rows: bytes of the tokens' activations, (rows, width).
        row: of each pair, its token, (pairs,).
        expert: of each pair, counted from the first of the rank that is asked, (pairs,).
    """

    kind: str
    rows: np.ndarray
    row: np.ndarray
    expert: np.ndarray

    def pack(self) -> bytes:
        head = _head(self.kind, len(self.rows), len(self.row), self.rows.shape[1])
        pairs = np.concatenate([self.row, self.expert]).astype(_NUMBER)
        return b"".join((head, pairs.tobytes(), self.rows.tobytes()))

    @classmethod
    def read(cls, data: memoryview | bytes, experts: int, node: str) -> Ask:
        """Read what `node` asks of a rank with `experts` experts; its rows are a view of `data`.

        Raises:
            WireError: it is no ask, or one for a token or an expert that is not there.
        """
        kind, rows, pairs, width, rest = _split(data, node)
        if len(rest) != 2 * pairs * _NUMBER.itemsize + rows * width:
            raise WireError(f"an ask of {rows} tokens for {pairs} experts in {len(rest)} bytes", node=node)
        numbers = np.frombuffer(rest, _NUMBER, 2 * pairs).astype(np.int64)
        row, expert = numbers[:pairs], numbers[pairs:]
        if pairs > rows * max(experts, MOST_ASKED):
            raise WireError(f"an ask of {rows} tokens for {pairs} experts, of which there are {experts}", node=node)
        if pairs * width > MOST_BYTES:
            raise WireError(f"an ask for {pairs} experts with tokens of {width} bytes", node=node)
        if row.max(initial=-1) >= rows or expert.max(initial=-1) >= experts:
            raise WireError("asks for a token or an expert that is not there", node=node)
        return cls(
            kind, np.frombuffer(rest, np.uint8, offset=2 * pairs * _NUMBER.itemsize).reshape(rows, width), row, expert
        )


def pack_answer(kind: str, rows: np.ndarray) -> bytes:
    """The answer to an ask: `rows` are bytes, (pairs, width)."""
    return b"".join((_head(kind, len(rows), len(rows), rows.shape[1]), rows.tobytes()))


def read_answer(data: memoryview | bytes, pairs: int, node: str) -> tuple[str, np.ndarray]:
    """Element type and rows of `node`'s answer to an ask of `pairs` pairs; the rows are a view of `data`.

    Raises:
        WireError: it is none.
    """
    kind, rows, told, width, rest = _split(data, node)
    if rows != pairs or told != pairs or len(rest) != pairs * width:
        raise WireError(f"an answer of {rows} rows in {len(rest)} bytes where {pairs} are due", node=node)
    return kind, np.frombuffer(rest, np.uint8).reshape(pairs, width)


def _head(kind: str, rows: int, pairs: int, width: int) -> bytes:
    return np.array([TYPES.index(kind), rows, pairs, width], _NUMBER).tobytes()


def _split(data: memoryview | bytes, node: str) -> tuple[str, int, int, int, memoryview]:
    view = memoryview(data)
    if len(view) < _HEAD * _NUMBER.itemsize:
        raise WireError(f"{len(view)} bytes where tokens for experts were due", node=node)
    code, rows, pairs, width = (int(each) for each in np.frombuffer(view, _NUMBER, _HEAD))
    if code >= len(TYPES) or width % ITEM_BYTES[code]:
        raise WireError("tokens for experts are of no type that is known", node=node)
    return TYPES[code], rows, pairs, width, view[_HEAD * _NUMBER.itemsize :]
