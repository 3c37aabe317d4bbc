"""Keys and values that a router has sent and that no plan has had kept yet. On the MLX thread."""

from __future__ import annotations

import mlx.core as mx

from mlxcel_nb.errors import Busy, WireError
from mlxcel_nb.models.batching_blocks import Block, packed
from mlxcel_nb.models.caches import every
from mlxcel_nb.models.part import LoadedPart
from mlxcel_nb.scheduling.step_plan import BLOCK

MOST_STAGED = 64 << 20
"""Bytes of blocks that have been put and not been kept yet, unless one block takes more."""

Pieces = dict[tuple[int, int], mx.array]
"""Keys (0) and values (1) of caches, by cache and which."""


class Staging:
    """Pieces of blocks that have come and are not kept yet, by who sent them, transfer, and block."""

    def __init__(self) -> None:
        self._staged: dict[tuple[str, int], dict[int, Pieces]] = {}

    @property
    def nbytes(self) -> int:
        return sum(_size(pieces) for blocks in self._staged.values() for pieces in blocks.values())

    def put(self, owner: str, transfer: int, index: int, pieces: Pieces) -> None:
        """Take pieces of block `index`.

        Raises:
            Busy: as much has come as may wait.
        """
        blocks = self._staged.setdefault((owner, transfer), {})
        if index not in blocks and self.nbytes and self.nbytes + _size(pieces) > MOST_STAGED:
            raise Busy("too much of what is to be loaded is waiting", advice="Try again in a moment.")
        blocks.setdefault(index, {}).update(pieces)

    def take(self, transfer: int, index: int, part: LoadedPart) -> Block:
        """Block `index`, which is wanted nowhere else any more.

        Raises:
            WireError: it has not come, or not all of it.
        """
        for (_, number), blocks in self._staged.items():
            if number == transfer and index in blocks:
                pieces = blocks.pop(index)
                break
        else:
            raise WireError(f"block {index} of a transfer is to be kept, and has not come")
        caches = sum(1 for _ in every(part.make_cache()))
        pairs = [(pieces.get((cache, 0)), pieces.get((cache, 1))) for cache in range(caches)]
        if any((keys is None) != (values is None) for keys, values in pairs):
            raise WireError(f"block {index} of a transfer has come without its values, or its keys")
        return packed(BLOCK, [None if keys is None or values is None else (keys, values) for keys, values in pairs])

    def drop(self, owner: str, transfer: int | None = None) -> None:
        """Forget a transfer of a router's, or all of them."""
        for key in [key for key in self._staged if key[0] == owner and transfer in (None, key[1])]:
            del self._staged[key]


def _size(pieces: Pieces) -> int:
    return sum(x.nbytes for x in pieces.values())
