"""Who lives: a state machine for each peer, fed by what its links and heartbeats say. Pure; one owner, any thread.

Events go in with the time at which they are known, changes come out. Two rules. `TRANSITIONS` names every step
there is; an event that it does not list for a state changes nothing. And each event about a process names its
incarnation: only a handshake (`Linked`) makes another incarnation the peer's present one, and what is said later of
one that was replaced counts for nothing.

    UNSEEN ── linked ──▶ ALIVE ── quiet 3 s ──▶ QUIET ── silent 6 s ─────────▶ DEAD
                           ▲ ◀────── heard ───────┘                              │
                           │                                                     │
                           ├── cut: the last link ends without a goodbye ─▶ CUT ─┤ one reconnect failed
                           │ ◀──────────────── linked ──────────────────────┘    │
                           └──────────────── linked, or a missing heartbeat ◀────┘

Peers are members: what they say of themselves is believed, but kept small. The figures are those of `util.times`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mlxcel_nb.util import times


class State(enum.Enum):
    """Where a peer stands; QUIET and CUT are both shown as "suspect"."""

    UNSEEN = "unseen"
    ALIVE = "alive"
    QUIET = "quiet"
    """No sign of life for `times.SUSPECT_S`."""
    CUT = "cut"
    """Its last link ended without a goodbye, and no reconnect has succeeded or failed yet."""
    DEAD = "dead"

    @property
    def shown(self) -> str:
        """In the words of a user: unseen, alive, suspect, dead."""
        return "suspect" if self in (State.QUIET, State.CUT) else self.value


class Signal(enum.Enum):
    """What an event or the clock amounts to."""

    LINKED = "linked"
    HEARD = "heard"
    BEAT = "beat"
    QUIET = "quiet"
    SILENT = "silent"
    MISSED = "missed heartbeats"
    CUT = "cut"
    LEFT = "left"
    UNREACHABLE = "unreachable"


TRANSITIONS: Mapping[State, Mapping[Signal, State]] = {
    State.UNSEEN: {Signal.LINKED: State.ALIVE},
    State.ALIVE: {
        Signal.QUIET: State.QUIET,
        Signal.SILENT: State.DEAD,
        Signal.MISSED: State.DEAD,
        Signal.CUT: State.CUT,
        Signal.LEFT: State.DEAD,
    },
    State.QUIET: {
        Signal.LINKED: State.ALIVE,
        Signal.HEARD: State.ALIVE,
        Signal.BEAT: State.ALIVE,
        Signal.SILENT: State.DEAD,
        Signal.MISSED: State.DEAD,
        Signal.CUT: State.CUT,
        Signal.LEFT: State.DEAD,
    },
    State.CUT: {
        Signal.LINKED: State.ALIVE,
        Signal.SILENT: State.DEAD,
        Signal.MISSED: State.DEAD,
        Signal.UNREACHABLE: State.DEAD,
    },
    State.DEAD: {
        Signal.LINKED: State.ALIVE,
        Signal.BEAT: State.ALIVE,  # it had missed some on a link that is open; with no link none can come
    },
}


@dataclass(frozen=True, kw_only=True)
class Linked:
    """A handshake with this incarnation is done: one link more."""

    node_id: str
    incarnation: bytes


@dataclass(frozen=True, kw_only=True)
class Heard:
    """Anything at all came over a link of it; told with the time it came, which may be a moment ago."""

    node_id: str
    incarnation: bytes


@dataclass(frozen=True, kw_only=True)
class Beat:
    """A heartbeat came.

    Args:
        progress: grows with what its MLX thread gets done; `busy` says whether it has work.
        load: figures of its own, by name: "step_s", after which a step without progress fails there, and others.
    """

    node_id: str
    incarnation: bytes
    progress: int = 0
    busy: bool = False
    load: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A link of it has ended, with a goodbye of the peer's or without."""

    node_id: str
    incarnation: bytes
    reason: str
    goodbye: bool = False


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """An attempt to connect to it has failed."""

    node_id: str
    reason: str


Event = Linked | Heard | Beat | Ended | Unreachable


@dataclass(frozen=True, kw_only=True)
class Change:
    """A peer's state is another now.

    Args:
        at: when, on the clock the events were given with.
        restarted: another incarnation than the one known before has appeared.
    """

    node_id: str
    signal: Signal
    before: State
    state: State
    reason: str
    at: float
    restarted: bool = False


@dataclass
class Member:
    """What is known of one peer. Times are readings of the caller's clock; `beat_at` is None before the first."""

    node_id: str
    since: float
    state: State = State.UNSEEN
    reason: str = "not connected yet"
    incarnation: bytes = b""
    links: int = 0
    heard_at: float = 0.0
    beat_at: float | None = None
    progress: int = 0
    progress_at: float = 0.0
    busy: bool = False
    load: Mapping[str, float] = field(default_factory=dict)

    def still_s(self, now: float) -> float | None:
        """How long a living peer with work has done nothing, where that is too long (see `stalled`); else None."""
        still_s, step_s = now - self.progress_at, self.load.get("step_s", times.STEP_S)
        return still_s if self.state is State.ALIVE and stalled(self.busy, still_s, step_s) else None


def stalled(busy: bool, still_s: float, step_s: float) -> bool:
    """Whether a thread has work and does nothing, though its process may answer every ping.

    Whoever only waits for a thread like that gives up after `step_s`, so a second later it is not taken for one.

    Args:
        still_s: since it last got anything done.
    """
    return busy and still_s >= step_s + times.PING_S


def missed_s() -> float:
    """Silence after which heartbeats alone call a peer dead: all that may be missed, and a second for the way."""
    return times.HEARTBEAT_S * times.HEARTBEAT_MISSES + times.PING_S


@dataclass
class Membership:
    """All peers of one node.

    Args:
        now: when it begins.
    """

    now: float
    members: dict[str, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._judged = self.now

    def expect(self, node_ids: Iterable[str], now: float) -> None:
        """Peers to be: UNSEEN until a handshake with them is done."""
        for node_id in node_ids:
            self.members.setdefault(node_id, Member(node_id, now))

    def forget(self, node_id: str) -> None:
        """It is no peer any more."""
        self.members.pop(node_id, None)

    def apply(self, event: Event, now: float) -> list[Change]:
        """What `event` changes."""
        if isinstance(event, Linked):
            return self._linked(event, now)
        member = self.members.get(event.node_id)
        if member is None:
            return []
        if isinstance(event, Unreachable):
            if member.state in (State.UNSEEN, State.DEAD):
                member.reason = event.reason  # the latest word on why it is not there
            return self._step(member, Signal.UNREACHABLE, event.reason, now)
        if event.incarnation != member.incarnation:
            return []
        match event:
            case Heard():
                if now <= member.heard_at:
                    return []  # no news
                member.heard_at = now
                return self._step(member, Signal.HEARD, "heard again", now)
            case Beat():
                return self._beat(member, event, now)
            case Ended():
                return self._ended(member, event, now)

    def judge(self, now: float) -> list[Change]:
        """What the time that has passed changes; to be called every `times.PING_S`.

        A call that comes late is not held against anybody: this process was asleep.
        """
        late = now - self._judged - times.PING_S
        self._judged = now
        changes: list[Change] = []
        for member in self.members.values():
            if late > times.PING_S:
                member.heard_at = min(now, member.heard_at + late)
                if member.beat_at is not None:
                    member.beat_at = min(now, member.beat_at + late)
            changes += self._judge(member, now)
        return changes

    def _judge(self, member: Member, now: float) -> list[Change]:
        if member.state in (State.UNSEEN, State.DEAD):
            return []
        silence = now - member.heard_at
        if silence >= times.DEAD_S:
            return self._step(member, Signal.SILENT, f"silent for {silence:.1f} s", now)
        if member.beat_at is not None and now - member.beat_at >= missed_s():
            missed = f"no heartbeat for {now - member.beat_at:.0f} s"
            return self._step(member, Signal.MISSED, missed, now)
        if silence >= times.SUSPECT_S:
            return self._step(member, Signal.QUIET, f"silent for {silence:.1f} s", now)
        return []

    def _linked(self, event: Linked, now: float) -> list[Change]:
        member = self.members.setdefault(event.node_id, Member(event.node_id, now))
        restarted = bool(member.incarnation) and member.incarnation != event.incarnation
        if member.incarnation != event.incarnation:
            member.incarnation = event.incarnation
            member.links, member.progress, member.busy, member.load = 0, 0, False, {}
            member.progress_at = now
            member.beat_at = None
        member.links += 1
        member.heard_at = now
        if member.beat_at is not None:
            member.beat_at = max(member.beat_at, now - times.HEARTBEAT_S)  # it had no way to send any
        return self._step(member, Signal.LINKED, "", now, restarted=restarted)

    def _beat(self, member: Member, event: Beat, now: float) -> list[Change]:
        member.beat_at = member.heard_at = now
        member.load = event.load
        if event.progress != member.progress or event.busy != member.busy:
            member.progress, member.busy, member.progress_at = event.progress, event.busy, now
        return self._step(member, Signal.BEAT, "heard again", now)

    def _ended(self, member: Member, event: Ended, now: float) -> list[Change]:
        member.links = max(0, member.links - 1)
        if member.links:
            return []
        return self._step(member, Signal.LEFT if event.goodbye else Signal.CUT, event.reason, now)

    @staticmethod
    def _step(member: Member, signal: Signal, reason: str, now: float, *, restarted: bool = False) -> list[Change]:
        before = member.state
        state = TRANSITIONS[before].get(signal, before)
        if state is before and not restarted:
            return []
        member.state, member.since = state, now
        member.reason = "" if state is State.ALIVE else reason
        return [
            Change(
                node_id=member.node_id,
                signal=signal,
                before=before,
                state=state,
                reason=member.reason,
                at=now,
                restarted=restarted,
            )
        ]
