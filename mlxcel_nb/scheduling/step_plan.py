"""What every member of an instance does in one step, as the leader's scheduler says it. Pure.

A member does, in this order: `free`, `keep`, `drop`, `adopt`, `restore`, `open`, then `work`. Memory is given back
before more is taken, and the scheduler's budget counts on it. Members run the same plans in the order of their `step`;
a plan without work is housekeeping only, and is a step like any other. Words:

* A *sequence* is known by its number. From `open` on it has caches of its own on the ranks of its `home`, until
  `drop`.
* A *prefill chunk* is one row of several tokens, run on the sequence's own caches (`group` is -1).
* *Decode* is one token for each row of a `group`, whose caches are one batch. `rows` are all that are in the group:
  whoever is in the batch and no longer in `rows` is set apart, with caches of its own again; whoever is in `rows` and
  not in the batch is merged in, from caches of its own. `rows` is also the batch's order.
* A *block* is the keys and values of `BLOCK` tokens, copied out of a sequence by `keep` and into a fresh one by
  `restore`, in order, from its first token on. Numbers of blocks are never used twice. `adopt` makes a block of what
  every rank of the home has been sent of one transfer, before the plan is told.

What a plan says of another home's sequences is none of a member's business: it passes over them.
"""

from __future__ import annotations

import dataclasses
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
class Work:
    """One forward over all stages, for sequences of one home.

    Args:
        home: expert-parallel rank that holds the sequences; 0 in all other layouts.
        group: whose batched cache it is, counted within the home; -1 for a prefill chunk, on a cache of its own.
        rows: numbers of sequences, in the order of the batch.
        count: tokens of each row.
        sample: a token is drawn for each row, from its last position; else the step gives nothing.
        prefill: a chunk of a prompt, or of what is read again; else decode.
        tokens: ids, `rows` times `count`, row after row; empty for members that do not read them.
    """

    home: int
    group: int
    rows: tuple[int, ...]
    count: int
    sample: bool
    prefill: bool
    tokens: tuple[int, ...] = dataclasses.field(default=(), repr=False)


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
    """

    sequence: int
    params: dict[str, Any] = dataclasses.field(repr=False)
    context: tuple[int, ...] = dataclasses.field(repr=False)
    position: int
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
    open: tuple[Open, ...] = ()
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
        if self.open:
            message["open"] = [[o.sequence, o.params, list(o.context), o.position, o.home] for o in self.open]
        if self.work:
            message["work"] = [
                [w.home, w.group, list(w.rows), w.count, w.sample, w.prefill, list(w.tokens) if with_tokens else []]
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
            open=_each(message, "open", 5, _read_open),
            work=_each(message, "work", 7, _read_work),
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


def _read_open(row: list[Any]) -> Open:
    sequence, params, context, position, home = row
    if not isinstance(params, dict) or not all(isinstance(key, str) for key in params):
        raise _refuse("open")
    tokens = _numbers(context, "open")
    return Open(_number(sequence, "open"), params, tokens, _number(position, "open"), _number(home, "open"))


def _read_work(row: list[Any]) -> Work:
    home, group, rows, count, sample, prefill, tokens = row
    if type(sample) is not bool or type(prefill) is not bool:
        raise _refuse("work")
    work = Work(
        home=_number(home, "work"),
        group=_number(group, "work", least=-1),
        rows=_numbers(rows, "work"),
        count=_number(count, "work", least=1),
        sample=sample,
        prefill=prefill,
        tokens=_numbers(tokens, "work"),
    )
    if not work.rows or len(set(work.rows)) != len(work.rows):
        raise _refuse("work", "names no row, or one twice")
    if work.prefill != (work.group == -1) or (len(work.rows) > 1 if prefill else not sample or count != 1):
        raise _refuse("work", "is neither a prefill chunk nor a step of a group")
    if len(work.tokens) not in (0, len(work.rows) * work.count):
        raise _refuse("work", f"has {len(work.tokens)} tokens for {len(work.rows)} x {work.count}")
    return work
