"""Sequences that decode together: their caches as one, and one forward for all of them.

Every rank of a mesh does the same to its groups in the same order, so that a row is the same sequence everywhere.
What a group does by itself (throwing rows away that have left, moving columns) follows from counts alone, which are
the same on all ranks. For the MLX thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import mlx.core as mx

from mlxcel_nb.models.batching_blocks import Block, cut
from mlxcel_nb.models.batching_rows import Kind, Numbers, arrays_of, forget, kind_of, like, rounded
from mlxcel_nb.models.caches import every, leaves
from mlxcel_nb.models.part import Handover, LoadedPart

PADDING = 64
"""Columns that no row needs any more, and that are tolerated before all rows are moved."""


def passes(part: LoadedPart, rows: int) -> int:
    """Forwards that a step of a group of `rows` takes, which those who only lend their experts have to know."""
    return rows if part.one_by_one else min(rows, 1)


def how(cache: Any) -> Kind:
    """What can be done with a cache of a part that does not run one by one."""
    kind = kind_of(cache)
    assert kind is not None, type(cache).__name__
    return kind


class Group:
    """Rows in the order they have joined, each known by the number of its sequence.

    A row that leaves a batch is not cut out at once: a copy of all others is dear, and the next to join can have its
    place. It stays, without a token, until what it has cost in steps is as much as the copy.

    Where the model's sequences cannot be batched, and where there is only one, the caches are those of single
    sequences, and there is a forward for each.

    A batch of R rows takes 4/3 R times what one of its longest row would, with the next token, rounded up to a multiple
    of 256 tokens.
    """

    def __init__(self, part: LoadedPart) -> None:
        self._part = part
        self._singles: dict[int, list[Any]] = {}
        self._batch: list[Any] | None = None
        self._slots: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._width = 0
        self._columns = 0
        self._wasted = 0

    @property
    def rows(self) -> tuple[int, ...]:
        """Sequences, in the order of what `forward` takes and gives."""
        return tuple(self._lengths)

    @property
    def passes(self) -> int:
        """Forwards of a step: handovers that each stage sends the next."""
        return passes(self._part, len(self._lengths))

    @property
    def width(self) -> int:
        """Sequences in each handover of the next step, those that have left and still have a place among them."""
        return 1 if self._batch is None else len(self._slots) if self._untidy else self._width

    @property
    def nbytes(self) -> int:
        """Of the caches, with room for tokens to come."""
        held = [self._batch] if self._batch is not None else list(self._singles.values())
        return sum(array.nbytes for caches in held for array in arrays_of(caches))

    def join(self, arrivals: Sequence[tuple[int, list[Any]]]) -> None:
        """Take in sequences, with the caches that they have been prefilled with; several at once cost one copy.

        Args:
            arrivals: numbers and caches, which are the group's from now on.
        """
        if not arrivals:
            return
        for row, caches in arrivals:
            self._lengths[row] = max((cache.offset for cache in leaves(caches)), default=0)
        if self._batch is None:
            self._singles.update(arrivals)
            if not self._part.one_by_one and len(self._singles) > 1:
                everyone, self._singles = list(self._singles.items()), {}
                self._build(everyone)
        elif not self._replace(arrivals):
            self._build(arrivals)

    def leave(self, rows: Collection[int]) -> None:
        """Let sequences go. What they held is given back, at once when nobody or one alone is left."""
        for row in rows:
            del self._lengths[row]
        if self._batch is None:
            for row in rows:
                del self._singles[row]
            return
        gone = [self._slots.pop(row) for row in rows]
        if len(self._lengths) > 1:
            self._clear(gone)
            return
        for row in self._lengths:
            self._singles[row] = self._taken(row)
        self._batch, self._slots = None, {}
        self._width = self._columns = self._wasted = 0

    def take_out(self, row: int) -> list[Any]:
        """Let a sequence go with its caches, for another group to take in."""
        caches = self._singles[row] if self._batch is None else self._taken(row)
        self.leave([row])
        return caches

    def cut(self, row: int, begin: int, end: int) -> Block:
        """The keys and values of a sequence's tokens from `begin` to `end`, as `batching_blocks.cut` gives them."""
        if self._batch is None:
            return cut(self._singles[row], begin, end)
        return cut(self._batch, begin, end, slot=self._slots[row])

    def forward(
        self,
        x: mx.array | list[Handover],
        on_layer: Callable[[int, mx.array], None] | None = None,
        *,
        all_logits: bool = False,
        lap: int = 0,
    ) -> Any:
        """Run the part over the next tokens of every row.

        Args:
            x: token ids (rows, L) where the part takes ids; else what the stage before gave, a handover for each pass.
            on_layer, all_logits: as of `LoadedPart.forward`.
            lap: as of `LoadedPart.forward`; a step is over after the last.

        Returns:
            Logits (rows, 1, V), or (rows, L, V) with `all_logits`, from the part that samples; else a list of as many
            handovers as there are passes. Not evaluated.
        """
        if lap == 0:
            self.tidy()
        if self._batch is None:
            inputs: list[Any] = x if isinstance(x, list) else [x[row : row + 1] for row in range(len(self._singles))]
            found = [
                self._part.forward(each, caches, on_layer, all_logits=all_logits, lap=lap)
                for each, caches in zip(inputs, self._singles.values(), strict=True)
            ]
            given = found if isinstance(found[0], dict) else mx.concatenate(found) if len(found) > 1 else found[0]
        else:
            slots = x[0] if isinstance(x, list) else self.spread(x)
            out = self._part.forward(slots, self._batch, on_layer, all_logits=all_logits, lap=lap)
            given = [out] if isinstance(out, dict) else out if self._in_order else out[mx.array(self.slots)]
        if lap == self._part.laps - 1:
            self.count(self._part.size_of(x[0])[1] if isinstance(x, list) else x.shape[1])
        return given

    # ------------------------------------------------------------- a step by somebody else, who has the rows together

    @property
    def together(self) -> list[Any]:
        """The caches of all slots, batched, or those of the one row that is alone."""
        if self._batch is not None:
            return self._batch
        (caches,) = self._singles.values()
        return caches

    @property
    def slots(self) -> list[int]:
        """Where each row is among the sequences of those caches."""
        return list(self._slots.values()) if self._batch is not None else [*range(len(self._singles))]

    def tidy(self) -> None:
        """A step is about to begin: `width`, `together` and `slots` are what they are until rows come or go."""
        if self._untidy:
            self._build([])

    def spread(self, ids: mx.array) -> mx.array:
        """Ids of all slots, from ids of the rows; a slot that is free is given a token that nobody reads."""
        if self._in_order:
            return ids
        rows = {slot: row for row, slot in enumerate(self._slots.values())}
        return ids[mx.array([rows.get(slot, 0) for slot in range(self._width)])]

    def count(self, length: int) -> None:
        """A step is over, which took `length` tokens of each row."""
        self._wasted += self._free
        self._columns += length
        for row in self._lengths:
            self._lengths[row] += length

    # ------------------------------------------------------------------------------------------ the batch's slots

    @property
    def _in_order(self) -> bool:
        """Slots are rows: nobody has left."""
        return list(self._slots.values()) == list(range(self._width))

    @property
    def _free(self) -> int:
        """Slots of those who have left."""
        return self._width - len(self._slots)

    @property
    def _untidy(self) -> bool:
        """Whether all rows are made anew before the next step: what they waste has cost as much.

        A copy of the caches takes about as long as half a decode step; a free slot costs its part of each step. Nor may
        the batch take more memory than it says: a quarter of its slots are free at most, and its columns are those of
        its longest row, rounded up to what mlx-lm adds at a time. (It would copy all of them to add more.)
        """
        if self._batch is None:
            return False
        if 4 * self._free > self._width or 2 * (self._wasted + self._free) > self._width:
            return True
        longest = max(self._lengths.values())
        padding = self._columns - longest
        return padding > max(PADDING, longest // 4) or rounded(self._columns + 1) > rounded(longest + 1)

    def _build(self, arrivals: Sequence[tuple[int, list[Any]]]) -> None:
        """All rows anew, close together: those that are here, then the arrivals.

        One layer after the other, whose old arrays are let go, so that only one is there twice.
        """
        kept = list(self._slots.values())
        before = [] if self._batch is None else [self._batch]
        pattern = [*before, *(caches for _, caches in arrivals)]
        numbers, built = Numbers(), []
        for old in zip(*map(every, pattern), strict=True):
            made = how(old[0]).build(old[0] if before else None, kept, old[len(before) :], numbers)
            mx.eval(arrays_of([made]))
            for cache in old:
                forget(cache)
            built.append(made)
        self._batch = like(pattern[0], iter(built))
        self._slots = {row: slot for slot, row in enumerate([*self._slots, *(row for row, _ in arrivals)])}
        self._width = len(self._slots)
        self._columns = max(self._lengths.values())
        self._wasted = 0

    def _replace(self, arrivals: Sequence[tuple[int, list[Any]]]) -> bool:
        """Put the arrivals where others have left, if there is room for all of them."""
        assert self._batch is not None
        free = sorted({*range(self._width)} - {*self._slots.values()})
        if len(arrivals) > len(free):
            return False
        layers, numbers = self._layers(), Numbers()
        singles = [list(every(caches)) for _, caches in arrivals]
        if not all(kind.fits(layer, one) for each in singles for (kind, layer), one in zip(layers, each, strict=True)):
            return False
        for (row, _), slot, each in zip(arrivals, free, singles, strict=False):
            for (kind, layer), one in zip(layers, each, strict=True):
                kind.put(layer, slot, one, numbers)
            self._slots[row] = slot
        mx.eval(arrays_of(self._batch))
        return True

    def _layers(self) -> list[tuple[Kind, Any]]:
        """Each of the batch's caches, and what can be done with it."""
        return [(how(cache), cache) for cache in every(self._batch)]

    def _clear(self, slots: Iterable[int]) -> None:
        numbers = Numbers()
        for kind, layer in self._layers():
            for slot in slots:
                kind.clear(layer, slot, numbers)

    def _taken(self, row: int) -> list[Any]:
        """A copy of one row, as caches of a single sequence."""
        assert self._batch is not None
        caches = like(self._batch, (kind.take(layer, self._slots[row]) for kind, layer in self._layers()))
        mx.eval(arrays_of(caches))
        return caches
