"""What a coordinator works with: the requests that have not ended, and what its scheduler has to know."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxcel_nb.models.batching_blocks import reusable
from mlxcel_nb.models.ending import Ending
from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.runtime.answers import Answer, Clock
from mlxcel_nb.runtime.commands import Generate
from mlxcel_nb.runtime.handoff.fetches import Fetch
from mlxcel_nb.runtime.instance import Instance
from mlxcel_nb.scheduling.limits import Limits
from mlxcel_nb.scheduling.sequence import Sequence

PREFILL_CHUNK = 256
"""Tokens a prefill step takes: large enough for the BLAS, small enough to hand to the next stage early."""


@dataclass(eq=False)
class Active:
    """A request that has not ended."""

    command: Generate
    answer: Answer
    ending: Ending
    clock: Clock
    prompt: list[int] = field(default_factory=list, repr=False)
    sequence: Sequence | None = None
    noted: bool = False
    """Members note what they see of it, where that is asked for."""
    readers: list[str] = field(default_factory=list)
    """Instances that may still read its prompt."""
    fetch: Fetch | None = None
    """How it was read by one of them, at last."""

    @property
    def reused(self) -> int:
        """Tokens that were not computed for it, here or where it was read."""
        if self.fetch is not None and self.fetch.first_s is not None:
            return self.fetch.reused
        return self.sequence.reused if self.sequence is not None else 0


def limits_of(instance: Instance, members: tuple[Room | None, ...], context: int) -> Limits:
    """What the scheduler has to know of the instance. A member that cannot say what room it has sets no bound."""
    rooms = tuple(room or Room({}, 0) for room in members)
    part, layout = instance.part, instance.layout
    return Limits(
        rooms=tuple((room,) for room in rooms) if layout.ep > 1 else (rooms,),
        context=context,
        stages=layout.pp,
        micro_batches=instance.order.micro_batches if part.laps == 1 else 1,
        in_flight=0 if part.laps == 1 else 1,
        chunk=PREFILL_CHUNK,
        reusable=reusable(part.make_cache()),
        mixed=part.mixes,
        padded=not part.one_by_one,
    )
