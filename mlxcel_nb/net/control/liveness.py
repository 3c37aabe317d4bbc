"""Whether a peer lives, judged by when it was heard. Pure: times go in, a judgement comes out.

A `ControlLink` owns one and tells it what arrives; the figures are those of `util.times`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mlxcel_nb.util import times


class Health(enum.Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True)
class Judgement:
    """What the times say; `ping` when an idle link is due for one."""

    health: Health
    reason: str = ""
    ping: bool = False


class Liveness:
    """The times of one peer, and `due`: when they are to be judged next.

    Every time is a reading of one monotonic clock, in seconds; `now` in the constructor is when the link began.
    """

    def __init__(self, now: float) -> None:
        self._heard = now
        self._frame_since: float | None = None
        self.due = now + times.PING_S

    @property
    def heard_at(self) -> float:
        """When the last sign of life came."""
        return self._heard

    def heard(self, now: float, *, within_frame: bool, frames: bool) -> None:
        """Bytes came.

        Args:
            within_frame: they end in the middle of a frame.
            frames: they completed at least one.
        """
        self._heard = now
        if not within_frame:
            self._frame_since = None
        elif frames or self._frame_since is None:
            self._frame_since = now

    def took(self, now: float) -> None:
        """The peer has read of what it is sent, though it says nothing: a slow reader is no dead one."""
        self._heard = now

    def judge(self, now: float) -> Judgement:
        """To be called at `due`. A call that comes late is not held against the peer: this process was asleep."""
        if (late := now - self.due) > times.PING_S:
            self._heard = min(now, self._heard + late)
            if self._frame_since is not None:
                self._frame_since = min(now, self._frame_since + late)
        silence = now - self._heard
        idle = silence >= times.PING_S
        self.due = (now if idle else self._heard) + times.PING_S
        if self._frame_since is not None:
            # Silence in the middle of a frame has a limit of its own.
            end = self._frame_since + times.FRAME_REST_S
            if now >= end:
                return Judgement(Health.DEAD, f"the rest of a frame did not come within {times.FRAME_REST_S:g} s")
            self.due = min(self.due, end)
        elif silence >= times.DEAD_S:
            return Judgement(Health.DEAD, f"silent for {silence:.1f} s")
        if silence >= times.SUSPECT_S:
            return Judgement(Health.SUSPECT, f"silent for {silence:.1f} s", ping=idle)
        return Judgement(Health.ALIVE, ping=idle)
