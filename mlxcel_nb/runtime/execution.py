"""All sequences of one epoch on one member: their caches, and the step plans that run on them.

Every member does what a plan says in the same order, so what one holds for a sequence the others hold too. Lives and
dies on the MLX thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from mlxcel_nb.errors import WireError
from mlxcel_nb.models.batching import Group, passes
from mlxcel_nb.models.batching_blocks import Block, cut, from_blocks
from mlxcel_nb.models.batching_rows import arrays_of, make_room
from mlxcel_nb.models.cache_parts import caches_of
from mlxcel_nb.models.mixing import Mixture
from mlxcel_nb.models.part import Handover, LoadedPart
from mlxcel_nb.models.sampling import Sampler, sample_rows
from mlxcel_nb.runtime.handoff.departures import Departure
from mlxcel_nb.runtime.handoff.handoff import Handoff
from mlxcel_nb.runtime.instance import Instance
from mlxcel_nb.runtime.outcomes import Outcome
from mlxcel_nb.runtime.recording import Recording
from mlxcel_nb.scheduling.step_plan import BLOCK, StepPlan, Work

SHORT_S = 0.2
"""A step that takes no longer is not looked at in between: whoever wants to stop it waits for its end."""


class Execution:
    """One epoch on this member.

    Args:
        check: raises when the epoch has been aborted; called after each layer of a prefill chunk.

    Attributes:
        ran: the step that was run last.
        recording: notes layers and logits of the one sequence there is, where that is asked for.
    """

    def __init__(self, instance: Instance, epoch: int, check: Callable[[], None]) -> None:
        layout, me = instance.layout, instance.me
        self.epoch = epoch
        self.ran = -1
        self._instance = instance
        self._home = instance.home
        self._part: LoadedPart = instance.part
        self._fabric = instance.fabric
        self._collectives = instance.collectives
        self._check = check
        self._first = layout.stage_of(me) == 0
        self._last = layout.stage_of(me) == layout.pp - 1
        self.samples = me == layout.sampler_at(self._home)
        self._leaving: list[tuple[Departure, list[Any], int]] = []
        """Who is read in this step and goes to another instance, its caches, and how long they are after it."""
        self._singles: dict[int, list[Any]] = {}
        self._lengths: dict[int, int] = {}
        self._groups: dict[int, Group] = {}
        self._group_of: dict[int, int] = {}
        self._samplers: dict[int, Sampler] = {}
        self._blocks: dict[int, Block] = {}
        self._token_s = math.inf  # what the latest step that read took, for each of its tokens
        self.recording: Recording | None = None

    @property
    def _handoff(self) -> Handoff | None:
        """What there is between this instance and others; it may come when steps have been run already."""
        return self._instance.handoff

    @property
    def nbytes(self) -> int:
        """Of keys, values and states held here."""
        singles = sum(array.nbytes for caches in self._singles.values() for array in arrays_of(caches))
        groups = sum(group.nbytes for group in self._groups.values())
        return singles + groups + sum(block.nbytes for block in self._blocks.values())

    def block(self, number: int) -> Block | None:
        """A kept block, once its plan has been run."""
        return self._blocks.get(number)

    def answers(self, plan: StepPlan) -> bool:
        """Whether the leader waits to hear of `plan` from this member, sampled or not."""
        return self.samples and any(work.home == self._home for work in plan.work)

    def run(self, plan: StepPlan, recording: Recording | None = None) -> Outcome:
        """Do what `plan` says; what was sampled, where this member samples.

        Args:
            recording: notes the sequence that begins with this plan, which runs alone.
        """
        work = next((each for each in plan.work if each.home == self._home), None)
        spans = self._fabric.spans
        if work is None:
            spans.begin(self.epoch, plan.step)
        else:
            rows, tokens = len(work.sequences), work.size
            spans.begin(self.epoch, plan.step, rows=rows, tokens=tokens, prefill=bool(work.chunks))
        outcome = self._run(plan, work, recording)
        spans.finish()
        self.ran = plan.step
        return outcome

    def _run(self, plan: StepPlan, work: Work | None, recording: Recording | None) -> Outcome:
        self._fabric.begin_step(self.epoch, plan.step)
        self._keep_house(plan)
        if recording is not None:  # after what ends with this plan, which may have been noted too
            self.recording = recording
        outcome, passed = {}, 0
        if work is not None:
            together = self._together(work)
            outcome, passed = self._compute(work, together), together.passes
        for _ in range(passed, self._rounds(plan)):  # of other homes: their tokens may want the experts here
            self._part.serve(self._check)
        return outcome

    def _rounds(self, plan: StepPlan) -> int:
        """Forwards that this step takes where it takes most; each is a turn of all ranks that hold experts."""
        if self._part.dispatch is None:
            return 0
        return max((passes(self._part, len(work.sequences)) for work in plan.work), default=0)

    def _compute(self, work: Work, together: Group | Mixture) -> Outcome:
        began = time.monotonic()
        outcome = self._forwards(work, together)
        if work.chunks:
            self._token_s = (time.monotonic() - began) / work.size
        if self._leaving and self._handoff is not None:
            for departure, caches, _ in self._leaving:
                departure.chunk_done(caches)
            for chunk in work.chunks:
                if chunk.sample:
                    self._handoff.departures.finish(chunk.sequence, self._singles[chunk.sequence])
            self._leaving = []
        return outcome

    def _forwards(self, work: Work, together: Group | Mixture) -> Outcome:
        for lap in range(self._part.laps):
            on_layer = self._after_layer if self._layer_by_layer(work) else None
            forward = partial(self._forward, work, together, lap, on_layer)
            y = self._collectives.run(forward, lazy=self._part.lazy and on_layer is None)
            if not self._last or lap + 1 < self._part.laps:
                for handover in y:
                    self._fabric.send_hidden([handover[name] for name in self._part.gives])
        if not self._last:
            return {}
        if not self.samples or not work.sampled:
            mx.eval(y)
            return {}
        logits = y[:, -1]
        if self.recording is not None:
            self.recording.on_logits(logits.reshape(-1))
        drawn = sample_rows([self._samplers[row] for row in work.sampled], logits)
        return dict(zip(work.sampled, drawn, strict=True))

    # -- what a plan asks for before its forward --------------------------------------------------

    def _keep_house(self, plan: StepPlan) -> None:
        """What ends and what begins, in the order in which all members do it."""
        for block in plan.free:
            self._blocks.pop(block, None)
        for keep in plan.keep:
            if keep.home == self._home:
                self._blocks[keep.block] = self._cut(keep.sequence, keep.begin, keep.begin + BLOCK)
        self._drop(plan.drop)
        for adopt in plan.adopt:
            if adopt.home == self._home:
                self._blocks[adopt.block] = self._instance.staging.take(adopt.transfer, adopt.index, self._part)
        if self._handoff is not None:
            self._hand_over(plan, self._handoff)
        for restore in plan.restore:
            if restore.home == self._home:
                blocks = [self._blocks[block] for block in restore.blocks]
                self._singles[restore.sequence] = from_blocks(blocks, self._part)
        for opened in plan.open:
            if opened.home != self._home:
                continue
            self._lengths[opened.sequence] = opened.length
            if self.samples:
                self._samplers[opened.sequence] = self._instance.sampler(opened)

    def _hand_over(self, plan: StepPlan, handoff: Handoff) -> None:
        """What comes from other instances, and what goes to them."""
        handoff.arrivals.prepare()
        for sequence in plan.drop:
            handoff.arrivals.drop(sequence)
            handoff.departures.drop(sequence)
        for expect in plan.expect:
            if expect.home == self._home:
                handoff.arrivals.expect(self.epoch, expect.transfer, expect.sequence, expect.length)
        lengths = {opened.sequence: opened.length for opened in plan.open}
        for land in plan.land:
            if land.home == self._home:
                kept = handoff.arrivals.take(land.transfer)
                self._singles[land.sequence] = caches_of(self._part, kept, lengths[land.sequence])
        for hand in plan.hand:
            if hand.home == self._home:
                handoff.departures.begin(hand)

    def _cut(self, sequence: int, begin: int, end: int) -> Block:
        group = self._group_of.get(sequence)
        if group is not None:
            return self._groups[group].cut(sequence, begin, end)
        return cut(self._singles[sequence], begin, end)

    def _drop(self, sequences: tuple[int, ...]) -> None:
        gone: dict[int, list[int]] = {}
        for sequence in sequences:  # some were never here
            self._singles.pop(sequence, None)
            self._lengths.pop(sequence, None)
            self._samplers.pop(sequence, None)
            if (group := self._group_of.pop(sequence, None)) is not None:
                gone.setdefault(group, []).append(sequence)
        for group, rows in gone.items():
            self._groups[group].leave(rows)
        if sequences:
            self.recording = None

    # -- the forward ------------------------------------------------------------------------------

    def _together(self, work: Work) -> Group | Mixture:
        """All that take part in `work`, with their caches."""
        group = self._grouped(work) if work.rows else None
        chunks = [(self._single(chunk.sequence), chunk.count) for chunk in work.chunks]
        if self._handoff is not None:
            self._leaving = [
                (departure, caches, departure.reads(caches, count))
                for chunk, (caches, count) in zip(work.chunks, chunks, strict=True)
                if (departure := self._handoff.departures.of(chunk.sequence)) is not None
            ]
        if work.mixed:
            return Mixture(self._part, group, chunks)
        if group is None:
            group = Group(self._part)
            group.join([(work.chunks[0].sequence, chunks[0][0])])
        return group

    def _single(self, row: int) -> list[Any]:
        """The caches of a sequence whose tokens are being read."""
        if row not in self._singles:
            self._singles[row] = self._part.make_cache()
        make_room(self._singles[row], self._lengths.get(row, 0))
        return self._singles[row]

    def _grouped(self, work: Work) -> Group:
        """The group of `work`, with the rows that it is to have."""
        group = self._groups.setdefault(work.group, Group(self._part))
        for row in [row for row in group.rows if row not in work.rows]:
            self._singles[row] = self._alone(row)
        joining = [row for row in work.rows if self._group_of.get(row) != work.group]
        group.join([(row, self._alone(row)) for row in joining])
        for row in joining:
            self._group_of[row] = work.group
        if group.rows != work.rows:
            raise WireError(f"group {work.group} is {list(group.rows)} here, and {list(work.rows)} in the plan")
        return group

    def _alone(self, row: int) -> list[Any]:
        """The caches of `row` by themselves, wherever they were."""
        if (group := self._group_of.pop(row, None)) is None:
            return self._singles.pop(row)
        return self._groups[group].take_out(row)

    def _after_layer(self, layer: int, output: mx.array) -> None:
        if self.recording is not None:
            self.recording.on_layer(layer, output)
        if self._part.laps == 1:
            for departure, caches, until in self._leaving:
                departure.on_layer(caches, until)
        self._check()

    def _layer_by_layer(self, work: Work) -> bool:
        """Whether the step may be long: then it is looked at after each layer, which are made one by one."""
        may_be_long = bool(work.chunks) and work.size * self._token_s > SHORT_S
        looked_at = may_be_long or self.recording is not None or bool(self._leaving)
        return looked_at and self._collectives.breakable

    def _forward(
        self, work: Work, together: Group | Mixture, lap: int, on_layer: Callable[[int, mx.array], None] | None
    ) -> Any:
        self._check()
        x: mx.array | list[Handover]
        count = 1 if work.rows or work.mixed else work.read
        if self._first and lap == 0:
            x = mx.array(work.tokens, dtype=mx.int32).reshape(-1, count)
        else:
            x = [self._received(together.width, count) for _ in range(together.passes)]
        if isinstance(together, Group):
            return together.forward(x, on_layer, lap=lap)
        return together.forward(x, on_layer, wanted=work.positions or (work.size - 1,), lap=lap)

    def _received(self, width: int, count: int) -> Handover:
        """What the stage before hands over for one forward."""
        handover = self._fabric.recv_hidden(self._part.takes)
        if self._part.size_of(handover) != (width, count):
            shape = handover["hidden"].shape
            raise WireError(f"activations of shape {shape} where {width} rows of {count} tokens were due")
        return handover
