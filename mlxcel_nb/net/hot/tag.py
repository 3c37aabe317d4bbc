"""What a tensor of a step is paired by. Pure."""

from __future__ import annotations

import functools
import re

from mlxcel_nb.errors import WireError

_NAME = re.compile(r"(\d{1,18})\.(\d{1,18})\.(\d{1,18})(?:\.(\d{1,18}))?", re.ASCII)


@functools.total_ordering
class Tag:
    """Epoch of the plan, step within it, and count of exchanges within the step. Later ones compare greater.

    A collective that goes through several phases numbers them by itself: `phase` is 0 for everybody else. Not to be
    changed: a tag knows from the start what stands for it in a header, so that whoever makes it before it is wanted
    has nothing left to do when microseconds count.
    """

    __slots__ = ("encoded", "epoch", "phase", "seq", "step")

    def __init__(self, epoch: int, step: int, seq: int, phase: int = 0) -> None:
        self.epoch = epoch
        self.step = step
        self.seq = seq
        self.phase = phase
        self.encoded = b"%d.%d.%d" % (epoch, step, seq)
        """The tensor's name on the wire, as it stands in a header."""
        if phase:
            self.encoded += b".%d" % phase

    @property
    def name(self) -> str:
        """The same as text."""
        return self.encoded.decode()

    def at(self, phase: int) -> Tag:
        """The tag of one phase."""
        return Tag(self.epoch, self.step, self.seq, phase)

    @classmethod
    def parse(cls, name: str) -> Tag:
        match = _NAME.fullmatch(name)
        if match is None:
            raise WireError(f"a tensor named {name!r:.60} where EPOCH.STEP.SEQ is due")
        return cls(int(match[1]), int(match[2]), int(match[3]), int(match[4] or 0))

    def _key(self) -> tuple[int, int, int, int]:
        return self.epoch, self.step, self.seq, self.phase

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tag) and self._key() == other._key()

    def __lt__(self, other: Tag) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"<Tag {self.name}>"
