"""What every member of an instance does in one step, as the leader's scheduler says it. Pure.

A member does, in this order: `free`, `keep`, `drop`, `adopt`, `restore`, `expect`, `land`, `open`, `hand`, then
`work`. Memory is given back before more is taken, and the scheduler's budget counts on it. Members run the same plans
in the order of their `step`; a plan without work is housekeeping only, and is a step like any other. Words:

* A *sequence* is known by its number. From `open` on it has caches of its own on the ranks of its `home`, until
  `drop`.
* A *prefill chunk* is several tokens of one sequence, run on the sequence's own caches.
* *Decode* is one token for each row of a `group`, whose caches are one batch. `rows` are all that are in the group:
  whoever is in the batch and no longer in `rows` is set apart, with caches of its own again; whoever is in `rows` and
  not in the batch is merged in, from caches of its own. `rows` is also the batch's order.
* A *block* is the keys and values of `BLOCK` tokens, copied out of a sequence by `keep` and into a fresh one by
  `restore`, in order, from its first token on. Numbers of blocks are never used twice. `adopt` makes a block of what
  every rank of the home has been sent of one transfer, before the plan is told.

* A *transfer* brings the keys and values of a sequence from an instance that has read its tokens. From `expect` on a
  member takes what comes of it; `land` makes the caches of a sequence of it, once every member has said that it has
  all. The other way, `hand` has what is read of a sequence sent to such an instance.

What a plan says of another home's sequences is none of a member's business: it passes over them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mlxcel_nb.errors import WireError

BLOCK = 32
"""Tokens whose keys and values are kept together, for other sequences that begin alike."""

LARGEST = 2**53
"""Numbers on the wire stay below this: a float holds every one of them."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a prompt, or of what is read again, that are read in one step; `sample` where they are its last."""

    sequence: int
    count: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Work:
    """One forward over all stages, for sequences of one home: the decode step of a group, prefill chunks, or both.

    Args:
        home: expert-parallel rank that holds the sequences; 0 in all other layouts.
        group: whose batched cache that of `rows` is, counted within the home; -1 without rows.
        rows: numbers of the sequences that decode, in the order of the batch. A token is drawn for each.
        chunks: of other sequences. Several, or some beside rows, only where `Limits.mixed`.
        tokens: ids, those of the rows and then those of the chunks; empty for members that do not read them.
    """

    home: int
    group: int
    rows: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()
    tokens: tuple[int, ...] = dataclasses.field(default=(), repr=False)

    @property
    def read(self) -> int:
        """Tokens of the chunks."""
        return sum(chunk.count for chunk in self.chunks)

    @property
    def size(self) -> int:
        """Tokens of the forward, of rows and chunks."""
        return len(self.rows) + self.read

    @property
    def sequences(self) -> tuple[int, ...]:
        """All that take part."""
        return (*self.rows, *(chunk.sequence for chunk in self.chunks))

    @property
    def sampled(self) -> tuple[int, ...]:
        """Those for which a token is drawn, in the order of what is sampled."""
        return (*self.rows, *(chunk.sequence for chunk in self.chunks if chunk.sample))

    @property
    def mixed(self) -> bool:
        """Whether it takes caches of several kinds at once."""
        return len(self.chunks) > (0 if self.rows else 1)

    @property
    def positions(self) -> tuple[int, ...]:
        """Where among the tokens the last ones of the `sampled` stand."""
        ends = itertools.accumulate((chunk.count for chunk in self.chunks), initial=len(self.rows))
        lasts = zip(self.chunks, list(ends)[1:], strict=True)
        return (*range(len(self.rows)), *(end - 1 for chunk, end in lasts if chunk.sample))


@dataclass(frozen=True, slots=True)
class Keep:
    """Copy tokens `begin` up to `begin + BLOCK` of the sequence's caches into block number `block`."""

    sequence: int
    begin: int
    block: int
    home: int = 0


@dataclass(frozen=True, slots=True)
class Adopt:
    """Keep what came of the sequence's block number `index`, counted from its first token on, as block `block`."""

    transfer: int
    index: int
    block: int
    home: int = 0


@dataclass(frozen=True, slots=True)
class Restore:
    """Begin the caches of a sequence, which is opened by the same plan, with copies of `blocks`."""

    sequence: int
    blocks: tuple[int, ...]
    home: int = 0


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence begins, or begins again: caches, and a sampler where it is sampled.

    Args:
        params: as the request gave them; only who samples reads them.
        context: the latest tokens, prompt and generated, as many as the sampler may look at; all generated ones are
            among them.
        position: how many tokens have been generated, so the next one is number `position`.
        length: tokens that its caches will have when all are read, restored ones included; 0 where nobody can tell.
    """

    sequence: int
    params: dict[str, Any] = dataclasses.field(repr=False)
    context: tuple[int, ...] = dataclasses.field(repr=False)
    position: int
    home: int = 0
    length: int = 0


@dataclass(frozen=True, slots=True)
class Expect:
    """Take what comes of `transfer`, of a sequence of `length` tokens that is not open yet; what came of an earlier
    transfer of the same sequence goes.
    """

    sequence: int
    transfer: int
    length: int
    home: int = 0


@dataclass(frozen=True, slots=True)
class Land:
    """Begin the caches of a sequence, which is opened by the same plan, with what has come of it."""

    sequence: int
    transfer: int
    home: int = 0


@dataclass(frozen=True, slots=True)
class Hand:
    """Send the first `length` tokens' keys and values of a sequence, which is opened by the same plan, as they are
    read: to the instance `to`, whose members know them in their `epoch` as `transfer`, of the request `request`.
    """

    sequence: int
    to: str
    epoch: int
    transfer: int
    request: str
    length: int
    home: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `free` are numbers of blocks, `drop` are numbers of sequences; see the module for order and meaning."""

    step: int
    keep: tuple[Keep, ...] = ()
    drop: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    adopt: tuple[Adopt, ...] = ()
    restore: tuple[Restore, ...] = ()
    expect: tuple[Expect, ...] = ()
    land: tuple[Land, ...] = ()
    open: tuple[Open, ...] = ()
    hand: tuple[Hand, ...] = ()
    work: tuple[Work, ...] = ()

    def to_dict(self, *, with_tokens: bool = True) -> dict[str, Any]:
        """What travels; what is empty is left out. Only members of the first stage need the tokens to be run."""
        message: dict[str, Any] = {"type": "plan", "step": self.step}
        if self.free:
            message["free"] = list(self.free)
        if self.keep:
            message["keep"] = [[k.sequence, k.begin, k.block, k.home] for k in self.keep]
        if self.drop:
            message["drop"] = list(self.drop)
        if self.adopt:
            message["adopt"] = [[a.transfer, a.index, a.block, a.home] for a in self.adopt]
        if self.restore:
            message["restore"] = [[r.sequence, list(r.blocks), r.home] for r in self.restore]
        if self.expect:
            message["expect"] = [[e.sequence, e.transfer, e.length, e.home] for e in self.expect]
        if self.land:
            message["land"] = [[x.sequence, x.transfer, x.home] for x in self.land]
        if self.hand:
            message["hand"] = [[h.sequence, h.to, h.epoch, h.transfer, h.request, h.length, h.home] for h in self.hand]
        if self.open:
            message["open"] = [[o.sequence, o.params, list(o.context), o.position, o.home, o.length] for o in self.open]
        if self.work:
            message["work"] = [
                [
                    w.home,
                    w.group,
                    list(w.rows),
                    [[c.sequence, c.count, c.sample] for c in w.chunks],
                    list(w.tokens) if with_tokens else [],
                ]
                for w in self.work
            ]
        return message

    @classmethod
    def from_dict(cls, message: dict[str, Any]) -> StepPlan:
        """The inverse of `to_dict`; fields of an envelope around it are passed over.

        Raises:
            WireError: a field is of another kind than it has to be.
        """
        return cls(
            step=_number(message.get("step"), "step"),
            keep=_each(message, "keep", 4, lambda row: Keep(*(_number(x, "keep") for x in row))),
            drop=_numbers(message.get("drop", []), "drop"),
            free=_numbers(message.get("free", []), "free"),
            adopt=_each(message, "adopt", 4, lambda row: Adopt(*(_number(x, "adopt") for x in row))),
            restore=_each(message, "restore", 3, _read_restore),
            expect=_each(message, "expect", 4, lambda row: Expect(*(_number(x, "expect") for x in row))),
            land=_each(message, "land", 3, lambda row: Land(*(_number(x, "land") for x in row))),
            hand=_each(message, "hand", 7, _read_hand),
            open=_each(message, "open", 6, _read_open),
            work=_each(message, "work", 5, _read_work),
        )


def _refuse(name: str, what: str = "cannot be read") -> WireError:
    return WireError(f"step plan: its {name} {what}")


def _number(value: Any, name: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < LARGEST:
        raise _refuse(name)
    return value


def _numbers(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise _refuse(name)
    return tuple(_number(each, name) for each in value)


def _each(message: dict[str, Any], name: str, length: int, read: Callable[[list[Any]], T]) -> tuple[T, ...]:
    rows = message.get(name, [])
    if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != length for row in rows):
        raise _refuse(name)
    return tuple(read(row) for row in rows)


def _read_restore(row: list[Any]) -> Restore:
    sequence, blocks, home = row
    return Restore(_number(sequence, "restore"), _numbers(blocks, "restore"), _number(home, "restore"))


def _read_hand(row: list[Any]) -> Hand:
    sequence, to, epoch, transfer, request, length, home = row
    if not isinstance(to, str) or not isinstance(request, str):
        raise _refuse("hand")
    sequence, epoch, transfer, length, home = (_number(x, "hand") for x in (sequence, epoch, transfer, length, home))
    return Hand(sequence, to, epoch, transfer, request, length, home)


def _read_open(row: list[Any]) -> Open:
    sequence, params, context, *numbers = row
    if not isinstance(params, dict) or not all(isinstance(key, str) for key in params):
        raise _refuse("open")
    return Open(_number(sequence, "open"), params, _numbers(context, "open"), *_numbers(numbers, "open"))


def _read_work(row: list[Any]) -> Work:
    home, group, rows, chunks, tokens = row
    if not isinstance(chunks, list):
        raise _refuse("work")
    work = Work(
        home=_number(home, "work"),
        group=_number(group, "work", least=-1),
        rows=_numbers(rows, "work"),
        chunks=tuple(map(_read_chunk, chunks)),
        tokens=_numbers(tokens, "work"),
    )
    if not work.sequences or len(set(work.sequences)) != len(work.sequences):
        raise _refuse("work", "names no sequence, or one twice")
    if bool(work.rows) != (work.group >= 0):
        raise _refuse("work", "has rows without a group, or a group without rows")
    if len(work.tokens) not in (0, work.size):
        raise _refuse("work", f"has {len(work.tokens)} tokens for {work.size}")
    return work


def _read_chunk(row: Any) -> Chunk:
    if not isinstance(row, list) or len(row) != 3 or type(row[2]) is not bool:
        raise _refuse("work")
    return Chunk(_number(row[0], "work"), _number(row[1], "work", least=1), row[2])
