"""How the ranks of a stage add their partial sums up: one of two strategies. For the MLX thread alone.

`Own` sums over our encrypted links, within the layer that needs it; any wait can be broken. A group of MLX's own
(`mlx_groups`) sums inside MLX's evaluation, which cannot be: its ranks vote before each step on whether to run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from mlxcel_nb.cluster.collectives import OWN
from mlxcel_nb.errors import MlxcelError
from mlxcel_nb.runtime.fabric import Fabric
from mlxcel_nb.runtime.protocol import LoadOrder

if TYPE_CHECKING:
    from mlxcel_nb.runtime.stuck import Inside


class Collectives(Protocol):
    """A strategy.

    Attributes:
        breakable: a step can be left between two of its layers.
    """

    breakable: bool

    def all_reduce(self, x: mx.array) -> mx.array:
        """Sum of `x`, which is given up, over the tensor ranks of this stage."""

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        """Rank 0: all tensor ranks' columns, `widths[r]` of rank r, side by side. Elsewhere only the shape is that."""

    def run(self, build: Callable[[], mx.array], *, lazy: bool = False) -> mx.array:
        """What `build` gives: one step of this rank's part, evaluated or not.

        Args:
            lazy: `build` looks at no numbers, so that sums need not be there before it is done.
        """

    def decline(self, error: MlxcelError) -> None:
        """This rank does not run the step that the fabric has begun: the others of its stage must not wait for it."""


class Own:
    """Over our own links."""

    breakable = True

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def all_reduce(self, x: mx.array) -> mx.array:
        return self._fabric.all_reduce(x)

    def gather(self, x: mx.array, widths: Sequence[int]) -> mx.array:
        return self._fabric.gather_columns(x, widths)

    def run(self, build: Callable[[], mx.array], *, lazy: bool = False) -> mx.array:
        if not lazy:
            return build()
        with self._fabric.deferring():
            return build()

    def decline(self, error: MlxcelError) -> None:
        """Nothing to do: the others are told by the abort of the epoch."""


def choose(order: LoadOrder, me: int, fabric: Fabric, inside: Inside) -> Collectives:
    """The strategy that `order` asks for; every rank of a stage calls this at the same point of a load.

    Raises:
        MlxcelError: MLX's group cannot be had, and why, naming the node.
    """
    if order.collectives == OWN or order.layout.tp == 1:
        return Own(fabric)
    from mlxcel_nb.runtime.mlx_groups import join

    return join(order, me, fabric, inside)
