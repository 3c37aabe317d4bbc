"""Where each step's time went on this node, kept for whoever asks: a ring of records of one size, and sums.

The MLX thread writes, any thread reads. Neither waits for the other: a record is written by one call that holds
the interpreter's lock, and a reader copies the ring under the same lock. Nothing is allocated for each step, and
what is full begins anew at its oldest record, so that hours of work take no more than `BYTES`.
"""

from __future__ import annotations

import enum
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlxcel_nb.errors import WireError

CAPACITY = 1 << 14
"""Records: at 50 steps a second and six records a step, those of the last minute."""

MOST = 4096
"""Records of one answer, 176 KiB."""

WINDOW = 256
"""Steps over which shares are taken."""

_RECORD = struct.Struct("<ddfIQIIHBB")
BYTES = CAPACITY * _RECORD.size


class Kind(enum.IntEnum):
    """What the time went to."""

    QUEUE = 0
    """On the leader: a request waited for its first step."""
    COMPUTE = 1
    """A step, without what its exchanges with others took; those of MLX's own groups cannot be told from it."""
    WAIT_PLAN = 2
    """Until the leader's next step; at most `worker.IDLE_WAIT_S` where there is none for longer."""
    WAIT_HIDDEN = 3
    """For what the stage before hands over, the bytes' way included."""
    WAIT_TOKENS = 4
    """On the leader: until another member has told what it sampled."""
    SEND_PLAN = 5
    SEND_HIDDEN = 6
    SEND_TOKENS = 7
    """Until the kernel, or memory that is shared, had taken all of it."""
    TRANSFER = 8
    """Exchanges among ranks of a stage: their bytes' way, and the wait for the one that is late."""
    STEP = 9
    """On the leader: from the result before, or from when there was work again, to this one. They do not overlap."""

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", " ")


class Span(NamedTuple):
    """A record.

    Args:
        start, end: readings of this node's monotonic clock, in seconds.
        seconds: less than from start to end where it stands for `count` intervals of one step with others in between.
        epoch, step: as in the plan; of a request in the queue, those of its first step.
        tokens, rows: of this member's work, so many tokens in all; a request's, of its prompt.
        kind: a `Kind`, or a number that a newer node knows.
        prefill: whether the step reads a prompt.
    """

    start: float
    end: float
    seconds: float
    epoch: int
    step: int
    tokens: int
    intervals: int
    rows: int
    kind: int
    prefill: bool


@dataclass(frozen=True)
class Reading:
    """Some of the records.

    Args:
        first: number of the first one here; higher than what was asked for where older ones are gone.
        next: ask for this number to go on.
        data: the records.
    """

    first: int
    next: int
    data: bytes

    def to_dict(self) -> dict[str, Any]:
        """What travels; the clock is the one of all `start`s and `end`s, as it stands now."""
        kinds = [kind.word for kind in Kind]
        return {"first": self.first, "next": self.next, "clock_s": time.monotonic(), "kinds": kinds, "data": self.data}


def read_spans(data: bytes) -> Iterator[Span]:
    """The records in `data`, as a `Reading` holds them.

    Raises:
        WireError: it is no whole number of records.
    """
    if len(data) % _RECORD.size:
        raise WireError(f"{len(data)} bytes are no whole number of spans")
    for start, end, seconds, epoch, step, tokens, intervals, rows, kind, prefill in _RECORD.iter_unpack(data):
        yield Span(start, end, seconds, epoch, step, tokens, intervals, rows, kind, bool(prefill))


class Spans:
    """The ring of one node.

    Attributes:
        totals: seconds of each kind since the node started, by its number.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.totals = [0.0] * len(Kind)
        self._capacity = capacity
        self._ring = bytearray(capacity * _RECORD.size)
        self._written = 0
        self._step = (0, 0, 0, 0, False)
        self._began = 0.0
        self._apart = 0.0
        self._starts = [0.0] * len(Kind)
        self._ends = [0.0] * len(Kind)
        self._seconds = [0.0] * len(Kind)
        self._counts = [0] * len(Kind)

    # -- the MLX thread ---------------------------------------------------------------------------

    def begin(self, epoch: int, step: int, *, rows: int = 0, tokens: int = 0, prefill: bool = False) -> None:
        """A step begins; what `note` was told of one that failed is forgotten."""
        self._step = (epoch, step, rows, tokens, prefill)
        self._apart = 0.0
        for kind in _NOTED:
            self._counts[kind] = 0
        self._began = time.monotonic()

    def note(self, kind: Kind, began: float) -> None:
        """An exchange of the step under way is over, which took from `began` until now."""
        now = time.monotonic()
        took = now - began
        if self._counts[kind]:
            self._counts[kind] += 1
            self._seconds[kind] += took
        else:
            self._counts[kind], self._starts[kind], self._seconds[kind] = 1, began, took
        self._ends[kind] = now
        self._apart += took

    def finish(self) -> None:
        """The step is done: what it computed, and what each kind of exchange took."""
        now = time.monotonic()
        epoch, step, rows, tokens, prefill = self._step
        computed = max(0.0, now - self._began - self._apart)
        self.add(Kind.COMPUTE, self._began, now, epoch, step, rows, tokens, prefill, computed)
        for kind in _NOTED:
            if count := self._counts[kind]:
                start, end, took = self._starts[kind], self._ends[kind], self._seconds[kind]
                self.add(kind, start, end, epoch, step, rows, tokens, prefill, took, count)

    def add(
        self,
        kind: Kind,
        start: float,
        end: float,
        epoch: int,
        step: int,
        rows: int = 0,
        tokens: int = 0,
        prefill: bool = False,
        seconds: float | None = None,
        intervals: int = 1,
    ) -> None:
        """One record; see `Span`."""
        if seconds is None:
            seconds = end - start
        self.totals[kind] += seconds
        at = self._written % self._capacity * _RECORD.size
        _RECORD.pack_into(self._ring, at, start, end, seconds, epoch, step, tokens, intervals, rows, kind, prefill)
        self._written += 1

    # -- any thread -------------------------------------------------------------------------------

    @property
    def written(self) -> int:
        """Records so far, and so the number of the next."""
        return self._written

    def read(self, since: int = 0, most: int = MOST) -> Reading:
        """Up to `most` records from number `since` on, or from the oldest one there is."""
        end = self._written
        ring = bytes(self._ring)
        begin = max(since, self._written + 1 - self._capacity, 0)  # the next to go may be written over by now
        begin = min(begin, end)
        end = min(end, begin + most)
        size, first, last = _RECORD.size, begin % self._capacity, end % self._capacity
        whole = first < last or begin == end
        data = ring[first * size : last * size] if whole else ring[first * size :] + ring[: last * size]
        return Reading(begin, end, data)

    def shares(self, steps: int = WINDOW) -> dict[str, Any]:
        """Seconds of the latest steps, of each kind, by its word, and how many steps they are; see `busy_share`."""
        seconds: dict[int, float] = {}
        seen: dict[int, int] = {}
        reading = self.read(self._written - steps * len(Kind), steps * len(Kind))
        for _, _, took, _, _, _, _, _, kind, _ in reversed(list(_RECORD.iter_unpack(reading.data))):
            if (count := seen.get(kind, 0)) < steps:
                seen[kind] = count + 1
                seconds[kind] = seconds.get(kind, 0.0) + took
        told = {Kind(kind).word: took for kind, took in sorted(seconds.items())}
        return {"steps": seen.get(Kind.COMPUTE, 0), "results": seen.get(Kind.STEP, 0), "seconds": told}


_NOTED = (Kind.WAIT_HIDDEN, Kind.SEND_HIDDEN, Kind.TRANSFER)


def busy_share(computed_s: float, steps: int, active_s: float, results: int) -> float | None:
    """The share of its time that a member computes while the engine has work; None where nothing was measured.

    Args:
        computed_s, steps: what the member computed in its latest steps, and how many they were.
        active_s, results: how long the leader had work for its latest results, and how many those were. Every member
            runs every step, so the two means are of the same ones but for those on their way.
    """
    if not steps or not results or active_s <= 0:
        return None
    return min(1.0, (computed_s / steps) / (active_s / results))
