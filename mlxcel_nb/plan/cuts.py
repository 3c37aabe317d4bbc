"""One rank's share of one array, as ranges along one of its axes. Pure.

Everything that needs a share asks here: how large it is, and which slices it is made of. A fused product has several
ranges (a rank's queries, its keys, its values); an array that no cut names is kept whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlxcel_nb.plan.shards import Range

KINDS = ("rows", "columns", "heads", "kv-groups", "experts")
"""What a cut falls between. Rows are output features and columns input features of a product's hidden units; heads and
kv-groups are rows or columns that belong to whole heads; experts are whole ones."""


@dataclass(frozen=True)
class Cut:
    """`ranges` of `axis`, in this order, make the rank's share.

    Args:
        how: one of `KINDS`.
        axis: of the whole array, counted from the front. The last axis is in features, not in packed words.
        ranges: in elements, ascending. Neighbours are joined.
    """

    how: str
    axis: int
    ranges: tuple[Range, ...]

    @property
    def size(self) -> int:
        """Elements of the share along the axis."""
        return sum(stop - start for start, stop in self.ranges)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of the share of an array of shape `whole`."""
        shape = list(whole)
        shape[self.axis] = self.size
        return tuple(shape)

    def is_all(self, whole: Sequence[int]) -> bool:
        """Nothing is left out, which is how a rank may hold all of a kv-head that its peers hold too."""
        return self.ranges == ((0, whole[self.axis]),)


def cut(how: str, axis: int, ranges: Iterable[Range]) -> Cut:
    """A cut of these ranges, those that touch joined to one."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif stop > start:
            joined.append((start, stop))
    return Cut(how, axis, tuple(joined))


def scaled(span: Range, size: int, offset: int = 0) -> Range:
    """The elements of the items of `span`, each `size` elements long, the first of all at `offset`."""
    return offset + span[0] * size, offset + span[1] * size
