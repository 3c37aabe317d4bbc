"""What an engine has to do and has done, as one value that is replaced now and then: any thread may look at it.

The MLX thread counts and publishes (`Ledger`); nobody asks it anything and nothing is locked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from mlxcel_nb.runtime.spans import Kind, Spans
from mlxcel_nb.scheduling.scheduler import Scheduler
from mlxcel_nb.scheduling.sequence import Sequence
from mlxcel_nb.scheduling.step_plan import StepPlan

EVERY_S = 0.1
"""Between two publications while steps follow each other; the last word, when there is nothing left, is always said."""


@dataclass
class Counts:
    """Since the model was loaded. The MLX thread alone writes.

    Args:
        requests: that were taken.
        refused: that were not, because too much was waiting.
        steps: that gave their result.
        prefilled_tokens: of prompts, run again ones after a preemption or a failure included.
        reused_tokens: of prompts, that were not run because their keys and values had been kept.
        generated_tokens: that were sampled for a request.
        failed_steps: after each, all caches were dropped; those that were broken off because nobody wants their result
            any more are not counted.
        reread: prompts that were not read elsewhere, as they were to be, and had to be read by somebody else.
    """

    requests: int = 0
    refused: int = 0
    steps: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    failed_steps: int = 0
    reread: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """A moment.

    Args:
        running, waiting: requests with caches, and those that wait for some.
        waiting_tokens: of the prompts that wait.
        kv_tokens: in the caches of running requests.
        kv_used_bytes, kv_available_bytes: on the node whose share in use is largest, kept blocks included.
        kept_blocks: of prefixes, for reuse.
        preemptions: how often a request was put back for lack of room.
        stages, micro_batches: of the pipeline.
        counts: see `Counts`.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_tokens: int = 0
    kv_used_bytes: int = 0
    kv_available_bytes: int = 0
    kept_blocks: int = 0
    preemptions: int = 0
    stages: int = 1
    micro_batches: int = 1
    counts: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self)
        return {**told, **told.pop("counts")}


def facts_of(scheduler: Scheduler, counts: Counts) -> EngineFacts:
    """As it stands. On the scheduler's thread."""
    use, limits = scheduler.kv_use(), scheduler.limits
    return EngineFacts(
        running=len(scheduler.running),
        waiting=scheduler.waiting,
        waiting_tokens=scheduler.waiting_tokens,
        kv_tokens=scheduler.kv_tokens,
        kv_used_bytes=use.used,
        kv_available_bytes=use.available,
        kept_blocks=scheduler.blocks,
        preemptions=scheduler.preemptions,
        stages=limits.stages,
        micro_batches=limits.groups,
        counts=asdict(counts),
    )


class Ledger:
    """Keeps `facts` up to date, and the leader's spans. For the MLX thread, but for `facts`.

    Attributes:
        facts: as of a moment ago; replaced as a whole.
    """

    def __init__(self, scheduler: Scheduler, spans: Spans) -> None:
        self.counts = Counts()
        self._scheduler = scheduler
        self._spans = spans
        self._at_work_since = 0.0
        self._published = 0.0
        self.facts = facts_of(scheduler, self.counts)

    def taken(self, now: float, *, idle: bool) -> None:
        """A request was; `idle` where there was nothing to do before."""
        self.counts.requests += 1
        if idle:
            self._at_work_since = now

    def started(self, sequence: Sequence, received: float, now: float, epoch: int, step: int) -> None:
        """A request that was `received` has its first step."""
        self.counts.reused_tokens += sequence.reused
        tokens = len(sequence.request.prompt)
        self._spans.add(Kind.QUEUE, received, now, epoch, step, 1, tokens, True)

    def done(self, plan: StepPlan, made: int, now: float, epoch: int) -> None:
        """The result of a step is here, with tokens for `made` requests that still want them."""
        counts, rows, read, tokens = self.counts, 0, 0, 0
        for work in plan.work:
            rows += len(work.sequences)
            tokens += work.size
            read += work.read
        counts.steps += 1
        counts.prefilled_tokens += read
        counts.generated_tokens += made
        self._spans.add(Kind.STEP, self._at_work_since, now, epoch, plan.step, rows, tokens, read > 0)
        self._at_work_since = now

    def publish(self, now: float | None = None) -> None:
        """Put new facts in the place of the old ones; not too often, where it is said what time it is."""
        if now is None or now - self._published >= EVERY_S:
            self._published = self._published if now is None else now
            self.facts = facts_of(self._scheduler, self.counts)
