"""A step plan while it is being made. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxcel_nb.scheduling.step_plan import Adopt, Expect, Hand, Keep, Land, Open, Restore, StepPlan, Work


@dataclass
class Draft:
    """The parts of a `StepPlan`, growing."""

    keep: dict[int, Keep] = field(default_factory=dict)
    """By block."""
    adopt: dict[int, Adopt] = field(default_factory=dict)
    """By block."""
    drop: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)
    restore: list[Restore] = field(default_factory=list)
    expect: list[Expect] = field(default_factory=list)
    land: list[Land] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)
    hand: list[Hand] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    def let_go(self, block: int) -> None:
        """Free a block; one that this very plan was to keep is not even made."""
        if self.keep.pop(block, None) is None and self.adopt.pop(block, None) is None:
            self.free.append(block)

    @property
    def empty(self) -> bool:
        housekeeping = self.keep or self.drop or self.free or self.adopt or self.restore
        return not (housekeeping or self.expect or self.land or self.open or self.hand or self.work)

    def plan(self, step: int) -> StepPlan:
        return StepPlan(
            step=step,
            keep=tuple(self.keep.values()),
            drop=tuple(self.drop),
            free=tuple(self.free),
            adopt=tuple(self.adopt.values()),
            restore=tuple(self.restore),
            expect=tuple(self.expect),
            land=tuple(self.land),
            open=tuple(self.open),
            hand=tuple(self.hand),
            work=tuple(self.work),
        )
