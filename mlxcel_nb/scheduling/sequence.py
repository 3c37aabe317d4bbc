"""A request as the scheduler sees it: its tokens, and how far they have come. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class HandTo(NamedTuple):
    """Where keys and values go when they have been read: to the instance `to`, in its `epoch`, where they are known as
    `transfer`, of the request `request`.
    """

    to: str
    epoch: int
    transfer: int
    request: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be run. Neither its `repr` nor its `vars` show what was asked.

    Args:
        prompt: token ids, at least one.
        max_tokens: most tokens to make, at least one; those that are made already are among them.
        made: tokens that were made elsewhere: it goes on after them.
        owner: who asks; owners are served in turn.
        params: for the sampler; the scheduler does not read them.
        recent: how many of the latest tokens the sampler may look at, beyond those generated.
        deadline: when `Scheduler.expire` ends it, on the clock of its callers; None for never.
        exclusive: runs while nothing else does.
        home: the expert-parallel rank that is to hold it; chosen by the scheduler when None.
        remote: another instance reads its prompt, and sends the keys and values here.
        hand: where they go when they have been read here; None where they stay.
    """

    prompt: tuple[int, ...] = field(repr=False)
    max_tokens: int
    owner: str = ""
    params: dict[str, Any] = field(default_factory=dict, repr=False)
    made: tuple[int, ...] = field(default=(), repr=False)
    recent: int = 0
    deadline: float | None = None
    exclusive: bool = False
    home: int | None = None
    remote: bool = False
    hand: HandTo | None = None


class State(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    """In the queue; for the first time, or because it was put back."""
    AWAITS = "awaits"
    """Its tokens are read elsewhere; keys and values are coming. There is room for them."""
    PREFILL = "prefill"
    """Its tokens are being read, on caches of its own."""
    DECODE = "decode"
    """It makes a token in each step of its group."""
    ENDED = "ended"


class Leaving(enum.Enum):
    """What becomes of a running sequence once it has no step in flight."""

    KEEP = "keep"
    """It is over; blocks of it are kept for others."""
    DROP = "drop"
    """It is over."""
    AGAIN = "again"
    """It is put back: dropped, and run again from its tokens when there is room."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One request inside the engine. The scheduler alone writes to it; like `Request` it shows no token.

    Args:
        number: grows by one a request, so a higher one arrived later.
        limit: most tokens it may make: as asked, and as context and memory allow. The engine ends it then ("length").
        arrived: when, on the caller's clock.
        tokens: prompt, and what was generated so far.
        cached: tokens whose keys and values are in the caches once all steps in flight are done.
        in_flight: steps on their way that it takes part in.
        group: the batch it decodes in, or is going to.
        batch: the one that the members have it in; -1 while they have it by itself.
        place: in that batch: they are in the order of their places.
        reused: tokens that were not computed, because others had been kept that begin alike.
        preemptions: how often it was put back for lack of room.
        failures: how many steps failed with it since it last made a token.
        suspect: it was in a step that failed, and shares none until it has made a token.
        started: when it first ran; None before.
        remote: its tokens are to be read elsewhere.
        transfer: by which members know what comes of it; -1 while nothing is expected.
        landed: all of it is there.
    """

    number: int
    request: Request = field(repr=False)
    limit: int
    arrived: float
    tokens: list[int] = field(repr=False)
    state: State = State.WAITING
    leaving: Leaving | None = None
    cached: int = 0
    in_flight: int = 0
    home: int = 0
    group: int = 0
    batch: int = -1
    place: int = 0
    reused: int = 0
    preemptions: int = 0
    failures: int = 0
    suspect: bool = False
    started: float | None = None
    remote: bool = False
    transfer: int = -1
    landed: bool = False

    @property
    def position(self) -> int:
        """Tokens generated, which is the number of the next one."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def most(self) -> int:
        """Tokens its caches ever hold: the last one made is never read."""
        return len(self.request.prompt) + self.limit - 1

    @property
    def to_read(self) -> int:
        """Tokens of a prefill that no step has taken yet."""
        return len(self.tokens) - self.cached if self.state is State.PREFILL else 0

    @property
    def decodes(self) -> bool:
        """Whether its next step is one of its group's."""
        return self.state is State.DECODE and self.leaving is None and self.position < self.limit

    @property
    def over(self) -> bool:
        """Nothing of it is wanted any more, whether or not its caches are still there."""
        return self.state is State.ENDED or self.leaving in (Leaving.KEEP, Leaving.DROP)

    @property
    def context(self) -> tuple[int, ...]:
        """What its sampler may look at."""
        return tuple(self.tokens[-latest:]) if (latest := max(self.position, self.request.recent)) else ()

    def begin(self) -> None:
        """Its caches are empty: it has just arrived, or all that there was is gone."""
        self.state, self.leaving, self.cached, self.in_flight = State.WAITING, None, 0, 0
        self.batch = self.transfer = -1
        self.landed = False
