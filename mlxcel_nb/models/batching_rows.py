"""Caches of several sequences as one, by kind: made of single ones, a row replaced, a row taken out again.

The batched kinds are mlx-lm's. In theirs all rows end at a common column, and shorter ones have padding before them,
which masks leave out. mlx-lm copies the whole batch whenever a row joins or leaves, and once more at the next step;
here a row that has left is replaced in place, and room for the tokens to come is there from the start.
For the MLX thread. Shapes: B rows, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxcel_nb.models import batching_table
from mlxcel_nb.models.caches import every

Pair = tuple[mx.array, mx.array] | None
"""Keys and values (B, H, columns, D)."""

STEP = 256
"""Columns by which mlx-lm's caches grow."""


class Numbers:
    """One array for each list of numbers, which is what many layers have in common: positions and padding."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], mx.array] = {}

    def __call__(self, values: Sequence[int]) -> mx.array:
        key = tuple(values)
        if key not in self._made:
            self._made[key] = mx.array(list(values))
        return self._made[key]


class Kind(Protocol):
    """What can be done with one kind of cache. `single` is of one sequence, `batch` of several."""

    def fits(self, batch: Any, single: Any) -> bool:
        """Whether `put` can take it: the batch is as wide as it is long."""

    def put(self, batch: Any, slot: int, single: Any, numbers: Numbers, /) -> None:
        """`single` in the place of a row."""

    def clear(self, batch: Any, slot: int, numbers: Numbers, /) -> None:
        """A row without tokens. Its slot remains, and is used for tokens that nobody wants."""

    def take(self, batch: Any, slot: int) -> Any:
        """A row, as a cache of one sequence; nothing of the batch is shared with it."""

    def build(self, batch: Any | None, kept: Sequence[int], singles: Sequence[Any], numbers: Numbers, /) -> Any:
        """A batch of the rows `kept`, in order, and of `singles` after them."""


def kind_of(cache: Any) -> Kind | None:
    """How to batch a cache, single or batched; None where mlx-lm has no batched kind of it."""
    from mlx_lm.models import cache as mlx_caches

    kinds: dict[type, Kind] = {
        mlx_caches.KVCache: PLAIN,
        mlx_caches.BatchKVCache: PLAIN,
        mlx_caches.RotatingKVCache: ROTATING,
        mlx_caches.BatchRotatingKVCache: ROTATING,
        mlx_caches.ArraysCache: STATES,
    }
    found = kinds.get(type(cache))
    return None if found is ROTATING and getattr(cache, "keep", None) else found  # tokens that are kept would be lost


def make_room(caches: Any, tokens: int) -> None:
    """Let the caches of one sequence, once they hold something, grow to `tokens` at once.

    Left to themselves those of mlx-lm copy all they hold whenever `STEP` more tokens are read, and whoever decodes
    beside a long prompt waits for it: 30 ms at the 1280th token of SmolLM2-135M, as long as a step.
    """
    for cache in every(caches):
        if kind_of(cache) is PLAIN and cache.keys is not None and cache.keys.shape[2] < tokens:
            cache.keys, cache.values = (
                mx.concatenate([x[:, :, : cache.offset], _columns(x, rounded(tokens) - cache.offset)], axis=2)
                for x in (cache.keys, cache.values)
            )


def _columns(like: mx.array, count: int) -> mx.array:
    batch, heads, _, dim = like.shape
    return mx.zeros((batch, heads, count, dim), like.dtype)


def why_not(model: Any, architecture: str) -> str:
    """Why sequences of a model run one by one, each in a forward of its own; empty where one does for all of them.

    Args:
        model: whole, before any of it is dropped, so that every rank comes to the same.
        architecture: the file of mlx-lm's that has it.
    """
    from mlx_lm.models.cache import make_prompt_cache

    if reason := batching_table.reason(architecture):
        return reason
    if any(type(module).__name__ == "DynamicNTKScalingRoPE" for module in model.modules()):
        return "its rotary positions depend on how long a sequence is, and mlx-lm takes one length for all"
    odd = next((cache for cache in every(make_prompt_cache(model)) if kind_of(cache) is None), None)
    return "" if odd is None else f"mlx-lm has no {type(odd).__name__} for several sequences"


def like(caches: Any, new: Iterator[Any]) -> list[Any]:
    """`new` ones, in the order of `every`, arranged as `caches` are."""
    return [_like(cache, new) for cache in caches]


def _like(cache: Any, new: Iterator[Any]) -> Any:
    if cache is None:
        return None
    if isinstance(cache, list | tuple):
        return type(cache)(like(cache, new))
    if hasattr(cache, "caches"):
        return type(cache)(*like(cache.caches, new))
    return next(new)


def arrays_of(caches: Any) -> list[mx.array]:
    """All that is large in caches, of these kinds and of others."""
    found: list[mx.array] = []
    for cache in every(caches):
        if kind_of(cache) is None:
            parts: Any = tree_flatten(vars(cache))
            found += [part for _, part in parts if isinstance(part, mx.array)]
        else:
            held = cache.cache if hasattr(cache, "cache") else (cache.keys, cache.values)
            found += [x for x in held if x is not None]
    return found


def forget(cache: Any) -> None:
    """Let go of a cache's arrays; it is not to be used again."""
    if hasattr(cache, "cache"):
        cache.cache = []
    else:
        cache.keys = cache.values = None


# -------------------------------------------------------------------------------------------- keys and values


class Plain:
    """Keys and values of every token, (B, H, columns, D)."""

    def fits(self, batch: Any, single: Any) -> bool:
        return bool(single.offset <= batch._idx)

    def put(self, batch: Any, slot: int, single: Any, numbers: Numbers) -> None:
        _write(batch, slot, [(batch._idx - single.offset, batch._idx)], _tokens(single))
        _number(batch, slot, single.offset, batch._idx - single.offset, numbers)

    def clear(self, batch: Any, slot: int, numbers: Numbers) -> None:
        _number(batch, slot, 0, batch._idx, numbers)

    def take(self, batch: Any, slot: int) -> Any:
        from mlx_lm.models.cache import KVCache

        single = KVCache()
        single.offset = batch.offset.tolist()[slot]
        single.keys, single.values = _read(batch, slot, [(batch._idx - single.offset, batch._idx)])
        return single

    def build(self, batch: Any | None, kept: Sequence[int], singles: Sequence[Any], numbers: Numbers) -> Any:
        from mlx_lm.models.cache import BatchKVCache

        old = [] if batch is None else _picked(batch.offset, kept)
        lengths = [*old, *(single.offset for single in singles)]
        longest = max(lengths)
        new = BatchKVCache([0])
        new.offset, new.left_padding = numbers(lengths), numbers([longest - length for length in lengths])
        new._idx = longest
        columns = [] if batch is None else [(batch._idx - max(old, default=0), batch._idx)]
        _assemble(new, batch, kept, columns, singles, longest, rounded(longest + 1))
        return new


class Rotating:
    """Keys and values of the last tokens, `max_size` at most; once it is full, the oldest column is overwritten."""

    def fits(self, batch: Any, single: Any) -> bool:
        width = _width(batch)
        return _held(single.offset, batch) <= width <= batch.max_size

    def put(self, batch: Any, slot: int, single: Any, numbers: Numbers) -> None:
        size, width = _held(single.offset, batch), _width(batch)
        _write(batch, slot, _ring(batch._idx, size, width), _tokens(single))
        _number(batch, slot, single.offset, width - size, numbers)

    def clear(self, batch: Any, slot: int, numbers: Numbers) -> None:
        _number(batch, slot, 0, _width(batch), numbers)

    def take(self, batch: Any, slot: int) -> Any:
        from mlx_lm.models.cache import RotatingKVCache

        single = RotatingKVCache(batch.max_size)
        single.offset = batch.offset.tolist()[slot]
        single._idx = size = _held(single.offset, batch)
        single.keys, single.values = _read(batch, slot, _ring(batch._idx, size, _width(batch)))
        return single

    def build(self, batch: Any | None, kept: Sequence[int], singles: Sequence[Any], numbers: Numbers) -> Any:
        from mlx_lm.models.cache import BatchRotatingKVCache

        limits = batch or singles[0]
        old = [] if batch is None else _picked(batch.offset, kept)
        lengths = [*old, *(single.offset for single in singles)]
        sizes = [_held(length, limits) for length in lengths]
        longest = max(sizes)
        new = BatchRotatingKVCache(limits.max_size, [0])
        # Its own array: mlx-lm changes it in place.
        new.offset, new.left_padding = numbers(lengths), mx.array([longest - size for size in sizes])
        new._idx = new._offset = longest
        columns = [] if batch is None else _ring(batch._idx, max(sizes[: len(old)], default=0), _width(batch))
        _assemble(new, batch, kept, columns, singles, longest, min(rounded(longest + 1), limits.max_size))
        return new


def _held(length: int, cache: Any) -> int:
    """Tokens in the window, of a sequence of `length`."""
    return min(length, int(cache.max_size))


def _width(batch: Any) -> int:
    """Columns in use. After several tokens at once they may be more than the window."""
    return int(batch.max_size if batch.rotated else batch._idx)


def _ring(end: int, count: int, width: int) -> list[tuple[int, int]]:
    """The `count` columns before `end`, oldest first, in a ring of `width`."""
    if count <= end:
        return [(end - count, end)]
    return [(width - (count - end), width), (0, end)]


def _picked(numbers: mx.array, rows: Sequence[int]) -> list[int]:
    values: Any = numbers.tolist()
    return [values[row] for row in rows]


def rounded(columns: int) -> int:
    """Columns that are allocated for so many."""
    return -(-columns // STEP) * STEP


def _number(batch: Any, slot: int, offset: int, padding: int, numbers: Numbers) -> None:
    """What a row's numbers are from now on."""
    offsets, paddings = batch.offset.tolist(), batch.left_padding.tolist()
    offsets[slot], paddings[slot] = offset, padding
    batch.offset = numbers(offsets)
    batch.left_padding = mx.array(paddings) if hasattr(batch, "rotated") else numbers(paddings)


def _tokens(single: Any) -> Pair:
    """Keys and values of the tokens that count, in time's order."""
    if single.keys is None:
        return None
    if not hasattr(single, "max_size"):
        return single.keys[:, :, : single.offset], single.values[:, :, : single.offset]
    size = _held(single.offset, single)
    keys, values = (single._temporal_order(x) for x in (single.keys, single.values))
    return keys[:, :, keys.shape[2] - size :], values[:, :, values.shape[2] - size :]


def _write(batch: Any, slot: int, columns: Sequence[tuple[int, int]], tokens: Pair) -> None:
    """Tokens in the `columns` of a row, one after the other."""
    if tokens is None:
        return
    at = 0
    for begin, end in columns:
        for into, new in zip((batch.keys, batch.values), tokens, strict=True):
            into[slot : slot + 1, :, begin:end] = new[:, :, at : at + end - begin]
        at += end - begin


def _read(batch: Any, slot: int, columns: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
    if batch.keys is None:
        return None, None
    pieces = [[x[slot : slot + 1, :, begin:end] for begin, end in columns] for x in (batch.keys, batch.values)]
    keys, values = (mx.concatenate(each, axis=2) if len(each) > 1 else mx.contiguous(each[0]) for each in pieces)
    return keys, values


def _assemble(
    new: Any,
    batch: Any | None,
    kept: Sequence[int],
    columns: Sequence[tuple[int, int]],
    singles: Sequence[Any],
    longest: int,
    capacity: int,
) -> None:
    """Give `new` its keys and values: `columns` of the rows `kept`, then `singles`, all ending at column `longest`."""
    old: Pair = None if batch is None or batch.keys is None else (batch.keys, batch.values)
    tokens = [pair for pair in map(_tokens, singles) if pair is not None]
    if old is None and not tokens:
        return
    made = []
    for which in range(2):
        like = old[which] if old is not None else tokens[0][which]
        out = mx.zeros((len(kept) + len(singles), like.shape[1], capacity, like.shape[3]), like.dtype)
        if old is not None:
            to = longest - sum(end - begin for begin, end in columns)
            for begin, end in columns:
                for first, start, stop in _runs(kept):
                    out[first : first + stop - start, :, to : to + end - begin] = old[which][start:stop, :, begin:end]
                to += end - begin
        for row, pair in enumerate(tokens, len(kept)):
            out[row : row + 1, :, longest - pair[which].shape[2] : longest] = pair[which]
        made.append(out)
    new.keys, new.values = made


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Rows that follow one another, at once: where the first of them goes, the first, one past the last."""
    first = 0
    while first < len(rows):
        count = 1
        while first + count < len(rows) and rows[first + count] == rows[first] + count:
            count += 1
        yield first, rows[first], rows[first] + count
        first += count


# ----------------------------------------------------------------------------------------------------- states


class States:
    """Arrays of a fixed size for each row, as state spaces and convolutions have: no columns, no padding."""

    def fits(self, batch: Any, single: Any) -> bool:
        return [x is None for x in batch.cache] == [x is None for x in single.cache]

    def put(self, batch: Any, slot: int, single: Any, _: Numbers) -> None:
        for index, state in enumerate(single.cache):
            if state is not None:
                batch.cache[index][slot : slot + 1] = state

    def clear(self, batch: Any, slot: int, numbers: Numbers) -> None:
        """Nothing to do: a state that nobody reads may be any."""

    def take(self, batch: Any, slot: int) -> Any:
        from mlx_lm.models.cache import ArraysCache

        single: Any = ArraysCache(len(batch.cache))
        single.cache = [None if x is None else mx.contiguous(x[slot : slot + 1]) for x in batch.cache]
        return single

    def build(self, batch: Any | None, kept: Sequence[int], singles: Sequence[Any], _: Numbers) -> Any:
        from mlx_lm.models.cache import ArraysCache

        sources = [] if batch is None else [(batch.cache, start, stop) for _, start, stop in _runs(kept)]
        sources += [(single.cache, 0, 1) for single in singles]
        new: Any = ArraysCache(len(sources[0][0]))
        for index in range(len(new.cache)):
            like = next((states[index] for states, *_ in sources if states[index] is not None), None)
            if like is not None:
                pieces = [_piece(states[index], start, stop, like) for states, start, stop in sources]
                new[index] = mx.concatenate(pieces)
        return new


def _piece(state: mx.array | None, start: int, stop: int, like: mx.array) -> mx.array:
    """Some rows of a state; zeros where a sequence has none yet."""
    return mx.zeros((stop - start, *like.shape[1:]), like.dtype) if state is None else state[start:stop]


PLAIN, ROTATING, STATES = Plain(), Rotating(), States()
