"""A step plan while it is being made. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxcel_nb.scheduling.step_plan import Adopt, Keep, Open, Restore, StepPlan, Work


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
    open: list[Open] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    def let_go(self, block: int) -> None:
        """Free a block; one that this very plan was to keep is not even made."""
        if self.keep.pop(block, None) is None and self.adopt.pop(block, None) is None:
            self.free.append(block)

    @property
    def empty(self) -> bool:
        return not (self.keep or self.drop or self.free or self.adopt or self.restore or self.open or self.work)

    def plan(self, step: int) -> StepPlan:
        return StepPlan(
            step=step,
            keep=tuple(self.keep.values()),
            drop=tuple(self.drop),
            free=tuple(self.free),
            adopt=tuple(self.adopt.values()),
            restore=tuple(self.restore),
            open=tuple(self.open),
            work=tuple(self.work),
        )
