"""What a loaded model can bear, as the scheduler is told once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlxcel_nb.plan.capacity import Room
from mlxcel_nb.scheduling.pipeline import micro_batches


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of one instance.

    Args:
        rooms: for each home, the room for caches on each of the nodes that hold its sequences; one home in all
            layouts but expert-parallel ones, where each rank is a home.
        context: most positions of a sequence; 0 where the model has no end.
        stages: of the pipeline.
        micro_batches: groups that decode in turn; 0 chooses.
        max_rows: sequences that run at once, all homes together.
        max_waiting: requests that wait at most; whoever comes then is told that it is busy.
        max_waiting_tokens: tokens of prompts that wait at most, all together.
        in_flight: steps that are on their way at most; 0 for one a stage.
        chunk: tokens of a prompt that are read in one step at most.
        reusable: whether a prefix's keys and values can be kept and begin another sequence: not where a window has
            slid over them, nor where a layer keeps a state instead.
        mixed: whether chunks are read in the forward of those who decode, several if they are short; else each has a
            forward of its own.
        padded: whether rows of a group take as much as its longest; else each takes its own.
        kept: share of each room that kept blocks take at most; they give way to sequences anyway.
        gap: a stream's time from token to token may grow to about this many times its idle one while prompts are read;
            0 for 1.6 where steps are mixed, and else 2.25, since a chunk by itself takes the time to read the weights.
    """

    rooms: tuple[tuple[Room, ...], ...]
    context: int = 0
    stages: int = 1
    micro_batches: int = 0
    max_rows: int = 64
    max_waiting: int = 256
    max_waiting_tokens: int = 1 << 20
    in_flight: int = 0
    chunk: int = 256
    reusable: bool = True
    mixed: bool = False
    padded: bool = True
    kept: float = 0.5
    gap: float = 0.0

    def __post_init__(self) -> None:
        counts = (self.stages, self.max_rows, self.max_waiting, self.max_waiting_tokens, self.chunk)
        assert self.rooms and all(self.rooms), "every home is on some node"
        assert min(counts) >= 1 and min(self.context, self.micro_batches, self.in_flight) >= 0
        assert self.slowdown > 1

    @property
    def slowdown(self) -> float:
        """The `gap` that counts."""
        return self.gap or (1.6 if self.mixed else 2.25)

    @property
    def homes(self) -> int:
        return len(self.rooms)

    @property
    def groups(self) -> int:
        """Of each home."""
        return micro_batches(self.stages, self.max_rows, self.micro_batches)

    @property
    def flights(self) -> int:
        """Steps that are on their way at most."""
        return self.in_flight or self.stages
